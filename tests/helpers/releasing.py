"""Hold all parts of a run beyond its end; print the process's memory before, during and after.

A subprocess, because freed memory that the allocator keeps would hide the effect.
"""

import json
import sys
from pathlib import Path

import gymnasium as gym
import hydra
import numpy as np
import psutil
from algorithms import eager, small
from hydra.core.hydra_config import HydraConfig

import steadyrl.loop as train
from steadyrl.memory.process import read_rss
from steadyrl.training.config.settings import CONFIGS
from steadyrl.training.run.collector import build_collector
from steadyrl.training.run.job import accept
from steadyrl.training.setup import open_run

WIDTH = 4096


class Wide(gym.Env):
    """16 KB observations, so that few steps need much memory."""

    observation_space = gym.spaces.Box(-1, 1, (WIDTH,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.np_random.random(WIDTH, np.float32), {}

    def step(self, action):
        self.time += 1
        return self.np_random.random(WIDTH, np.float32), 1.0, self.time >= 50, False, {}


COMMON = (
    "env.id=Wide-v0",
    "env.num_envs=4",
    "device=cpu",
    "eval.every=400",
    "eval.episodes=2",
    "log.every=200",
)


def run(*overrides):
    """Train; return the parts and the RSS during the run."""
    config = hydra.compose("config", [*COMMON, *overrides], return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    del config.hydra
    with open_run(accept(config)) as (run, env, agent):
        train.loop(run, build_collector(run, env, agent))
        meanwhile = read_rss(psutil.Process())
        assert agent.updates
    return (run, env, agent), meanwhile


def main(agent, folder):
    gym.register("Wide-v0", Wide)
    process = psutil.Process()
    overrides = (*eager(agent), *small(agent).large)
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        # A first run of the same size: it imports libraries and compiles kernels, and matrix
        # products of this size take buffers that their library keeps (13 MB on some processors).
        run(*overrides, f"run_dir={folder / 'first'}")
        before = read_rss(process)
        parts, meanwhile = run(*overrides, f"run_dir={folder / 'second'}")
        after = read_rss(process)
    assert parts  # the parts are alive until here
    print(json.dumps({"before": before, "meanwhile": meanwhile, "after": after}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
