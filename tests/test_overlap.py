"""Updates overlap with environment steps, without effect on the weights."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from opened import job

from steadyrl.agents.base import Decision
from steadyrl.envs.factory import build_env
from steadyrl.envs.settings import EnvSettings
from steadyrl.loop import loop, train
from steadyrl.training.run.collector import StepCollector
from steadyrl.training.speed.part_times import PartTimes

SETTINGS = EnvSettings(
    id="waiting_env:Waiting-v0",
    num_envs=1,
    backend="async",
    frame_stack=1,
    kwargs={},
    wrappers=(),
    action_masks="false",
    image_axes="auto",
    image_range=None,
    step_timeout=30.0,
    max_restarts=0,
    info_metrics=(),
)


class Writer:
    """An agent whose update unblocks the environment."""

    can_update_during_step = True

    def __init__(self, pipe):
        self.pipe = Path(pipe)

    def act(self, obs, episode_starts):
        return Decision(torch.from_numpy(obs), torch.zeros(1, dtype=torch.int64))

    def update(self):
        self.pipe.write_bytes(b"learned")

    def observe(self, decision, step):
        self.reward = step.reward.copy()


def test_updates_run_between_send_and_receive(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    settings = replace(SETTINGS, kwargs={"pipe": str(pipe)})
    steps = []
    with build_env(settings, seed=0) as env:
        run = SimpleNamespace(
            done=False, event_due=False, signalled=False, cut_short=False, part_times=PartTimes()
        )
        run.pop_pending_step = lambda: None
        run.sync_ranks = lambda step: 1
        agent = Writer(pipe)

        def on_steps(collected):
            steps.append(collected.steps)
            run.done = len(steps) == 3

        run.on_steps = on_steps
        env.reset()
        loop(
            run, StepCollector(run, env, agent, agent)
        )  # without overlap, both would wait for ever
    assert len(steps) == 3
    assert agent.reward.tolist() == [1.0]


def test_all_exact_backends_give_the_same_weights(tmp_path):
    """async overlaps updates with steps, and kernels are other code."""
    weights = {}
    for backend in ("sync", "async", "kernel"):
        chosen = (f"env.backend={backend}", "env.num_envs=3", "total_steps=900", "eval.every=0")
        train(job(tmp_path / backend, *chosen))
        summary = json.loads((tmp_path / backend / "run" / "summary.json").read_text())
        assert summary["updates"] > 100
        weights[backend] = summary["weights_sha256"]
    assert weights["sync"] == weights["async"] == weights["kernel"]
