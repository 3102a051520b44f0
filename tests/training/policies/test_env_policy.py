"""Actions of an exported graph are those that the decoder gives to environments."""

import io

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import steadyrl
from steadyrl.envs.encoding.spaces import action_decoder
from steadyrl.envs.types import (
    BoxActions,
    DiscreteActions,
    MultiBinaryActions,
    MultiDiscreteActions,
)
from steadyrl.training.cli.policy_files.export import main as export
from steadyrl.training.policies.env_policy import EnvPolicy

INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32]
SPACES = [
    spaces.Discrete(5),
    spaces.Discrete(5, start=-2, dtype=np.int32),
    spaces.MultiDiscrete([2, 3], dtype=np.int32),
    spaces.MultiDiscrete([[2, 3], [2, 2]], start=[[1, 2], [-3, 4]]),
    spaces.MultiBinary(3),
    spaces.MultiBinary([2, 3]),
    spaces.Box(np.float32([-2, 0]), np.float32([2, 10])),
    spaces.Box(-np.inf, np.inf, (2,)),
    spaces.Box(0, np.inf, (1, 2)),
    spaces.Box(-1, 1, ()),
    spaces.Box(-0.1, 0.1, (2, 2), np.float64),
    spaces.Box(-1, 1, (2,), np.float16),
    spaces.Box(-(2**62) + 1, 2**62 - 1, (2,), np.int64),
    *(spaces.Box(-3 if np.dtype(kind).kind == "i" else 0, 3, (2,), kind) for kind in INTEGERS),
]


class Chooser(nn.Module):
    """What an agent chooses in a space, in the form that its decoder takes."""

    def __init__(self, actions):
        super().__init__()
        self._actions = actions
        field = {BoxActions: "low", MultiDiscreteActions: "nvec"}.get(type(actions), "n")
        sized = getattr(actions, field)
        self._outputs = nn.Linear(4, sized if isinstance(sized, int) else len(sized))

    def forward(self, obs):
        outputs = 6 * self._outputs(obs)
        if isinstance(self._actions, DiscreteActions):
            return outputs.argmax(-1)
        if isinstance(self._actions, MultiDiscreteActions):
            return outputs.abs().long() % torch.tensor(self._actions.nvec)
        return (outputs > 0).long() if isinstance(self._actions, MultiBinaryActions) else outputs


@pytest.fixture(params=SPACES, ids=str)
def case(request):
    space = request.param
    torch.manual_seed(0)
    decoder, obs = action_decoder(space), torch.randn(64, 4)
    chooser = Chooser(decoder.spec).requires_grad_(False)
    decoded = np.stack(decoder.decode(chooser(obs).numpy()))
    assert all(action in space for action in decoded)
    return EnvPolicy(chooser, space), obs, decoded


def test_it_returns_what_the_decoder_gives_to_environments(case):
    policy, obs, decoded = case
    actions = policy(obs).numpy()
    np.testing.assert_array_equal(actions, decoded)
    assert actions.shape == decoded.shape
    assert actions.dtype == (np.int64 if decoded.dtype in (np.uint16, np.uint32) else decoded.dtype)


def test_onnx_runtime_returns_the_same(case):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    policy, obs, decoded = case
    file, names = io.BytesIO(), {"input_names": ["observation"], "output_names": ["action"]}
    axes = {"observation": {0: "n"}, "action": {0: "n"}}
    torch.onnx.export(policy, (obs[:2],), file, dynamo=False, dynamic_axes=axes, **names)
    (actions,) = onnxruntime.InferenceSession(file.getvalue()).run(
        None, {"observation": obs.numpy()}
    )
    np.testing.assert_allclose(actions, decoded, rtol=1e-5, atol=1e-4)


NARROW = "Narrow-v0"


class Narrow(gym.Env):
    """Actions within bounds that a Gaussian's mean leaves, and that the environment insists on."""

    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = spaces.Box(np.float32([-0.01, 3]), np.float32([0.01, 4]))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert action in self.action_space
        return self.observation_space.sample(), 0.0, False, True, {}


def test_an_exported_file_gives_actions_that_the_environment_takes(tmp_path, monkeypatch):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    monkeypatch.setitem(gym.registry, NARROW, gym.envs.registration.EnvSpec(NARROW, Narrow))
    small = ("agent.hidden=[8]", "agent.rollout_steps=32", "agent.epochs=1", "agent.minibatches=1")
    steps = ("env.num_envs=2", "total_steps=64", "eval.every=0", "log.tensorboard=false")
    run = tmp_path / "run"
    overrides = ["agent=ppo", f"env.id={NARROW}", "agent.scale_actions=false", *small, *steps]
    steadyrl.train([*overrides, f"run_dir={run}"], quiet=True)
    export([str(run), "--onnx", str(tmp_path / "policy.onnx")])
    model = onnxruntime.InferenceSession(str(tmp_path / "policy.onnx"))
    obs = np.random.default_rng(0).uniform(-1, 1, (64, 4)).astype(np.float32)
    (actions,) = model.run(None, {"observation": obs})
    np.testing.assert_allclose(actions, steadyrl.load(run).act(obs), atol=1e-4)
    assert all(action in Narrow.action_space for action in actions)
