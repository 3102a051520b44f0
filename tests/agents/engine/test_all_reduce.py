"""A step split in two around an all-reduce equals the whole step, in every mode."""

import pytest
import torch
from changed import changed
from ppo_agents import SETTINGS, SPACES, Episodes, learn

from steadyrl.agents.learner.comm import Comm
from steadyrl.agents.ppo.agent import PPO
from steadyrl.envs.types import EnvSpec


class Echo(Comm):
    """A single process that runs the code path of several ranks."""

    is_single = False
    asked = 0

    def all_reduce_(self, tensor):
        self.asked += 1
        return tensor


def trained(device, mode, comm):
    spec = EnvSpec("Synthetic", 3, (4,), "float32", 1, SPACES["discrete"])
    changes = {"compile": mode, "normalize_obs": True, "target_kl": 0.01, "epochs": 3}
    agent = PPO(changed(SETTINGS, **changes), spec, device=device, seed=0, total_steps=10_000)
    if comm is not None:
        agent.attach_comm(comm)
    env = Episodes()
    learn(agent, env, env.reset(), 4)
    return agent._learner.network.weights.detach().cpu()


@pytest.mark.parametrize(
    ("device", "mode"),
    [
        ("cpu", "false"),
        pytest.param("cpu", "true", marks=pytest.mark.slow),
        pytest.param("cuda", "false", marks=pytest.mark.gpu),
        pytest.param("cuda", "true", marks=pytest.mark.gpu),
        pytest.param("cuda", "cudagraph", marks=pytest.mark.gpu),
    ],
)
def test_an_all_reduce_step_equals_the_whole_step(device, mode):
    comm = Echo()
    single_step, halves = (trained(torch.device(device), mode, each) for each in (None, comm))
    assert comm.asked > 4 * 3
    torch.testing.assert_close(halves, single_step, rtol=1e-4, atol=1e-5)
