"""Impossible values in a checkpoint are rejected with code 3, or do not affect the result."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from poison import CASES, COMMON, EXTRA, Poison, Poisoned, poisons, some_of_each
from pole_teacher import Pole

from steadyrl.agents.distillation.teacher import ObjectTeacher, TeacherError, TeacherGuide
from steadyrl.agents.engine.cpu.network import Convolution, HostNetwork, Layer
from steadyrl.agents.engine.cpu.policy import q_on_host
from steadyrl.agents.learner.schedules import Schedule
from steadyrl.agents.networks.distributions import build_head
from steadyrl.agents.networks.q_network import QNetwork
from steadyrl.agents.registry import ALGORITHMS
from steadyrl.core.saved_state import numpy_generator, set_numpy_generator, torch_generator
from steadyrl.core.state import to_plain
from steadyrl.envs.backends.kernel import KernelBackend
from steadyrl.envs.kernels.kernel import Kernel
from steadyrl.envs.settings import EnvSettings
from steadyrl.envs.types import DiscreteActions
from tests.training.checkpoints.test_hostile_state import outcome, resumable

IN_PROCESS = (
    *(each for each in COMMON if not each.startswith(("resume", "checkpoint.keep"))),
    "checkpoint.keep=1",
)
VALUES_EACH = 2  # poisoned values for every leaf, branch and tensor of a checkpoint
OUT_OF_RANGE = {  # (column of a kernel's int_state, value beyond its range)
    "FrozenLake-v1": [(0, 16), (0, 1_000_000), (0, -1)],
    "CliffWalking-v1": [(0, 48)],
    "Taxi-v4": [(0, 500)],
    "MinAtar/Breakout-v1": [(1, 10), (1, 10**6), (2, -1), (3, 4), (4, 10), (8, 2), (0, 6)],
    "MinAtar/Asterix-v1": [(1, 10), (2, 0), (2, 9), (10, -2)],
    "MinAtar/Freeway-v1": [(1, 10), (4, 10), (6, 6)],
    "MinAtar/Seaquest-v1": [(1, 10), (2, 9), (13, 9), (17, 9), (18, 11), (19, -1)],
    "MinAtar/SpaceInvaders-v1": [(1, 10), (1, 2**62), (7, 2)],
}


def settings(env_id: str) -> EnvSettings:
    nothing: dict[str, Any] = {"kwargs": {}, "wrappers": (), "info_metrics": ()}
    return EnvSettings(
        id=env_id,
        num_envs=2,
        frame_stack=1,
        backend="kernel",
        action_masks="auto",
        image_axes="auto",
        image_range=None,
        step_timeout=60.0,
        max_restarts=0,
        **nothing,
    )


def restore(env_id: str, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Restore two environments mid-episode from a changed state.

    State values are the lower bounds of their ranges, so that no kernel need be compiled.
    """
    if env_id.startswith("MinAtar"):
        pytest.importorskip("minatar")
    backend = KernelBackend(settings(env_id), seed=1)
    state = to_plain(backend.snapshot()) | {"episode": [3, 4], "needs_reset": [False, False]}
    simulation = state["simulation"]
    for kind, ranges in (("int_state", "int_ranges"), ("float_state", "float_ranges")):
        limits = torch.tensor(getattr(backend.kernel, ranges), dtype=simulation[kind].dtype)
        if len(limits):
            simulation[kind].clamp_(*limits.T)
    change(simulation)
    backend.restore(state, [None, None], backend.buffers()[0])


@pytest.mark.parametrize("env_id", OUT_OF_RANGE)
def test_kernel_integers_out_of_range_are_rejected_by_name(env_id: str) -> None:
    restore(env_id, lambda simulation: None)
    for column, value in OUT_OF_RANGE[env_id]:

        def change(simulation: dict[str, torch.Tensor]) -> None:
            simulation["int_state"][1, column] = value  # noqa: B023 - called at once

        with pytest.raises(ValueError, match=rf"int_state: number {column} of environment 1 is"):
            restore(env_id, change)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1", "Pendulum-v1", "MountainCar-v0"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e20])
def test_invalid_kernel_floats_are_rejected(env_id: str, value: float) -> None:
    with pytest.raises(ValueError, match="float_state"):
        restore(env_id, lambda simulation: simulation["float_state"][0, 1].fill_(value))


@pytest.mark.parametrize("env_id", ["CartPole-v1", "MinAtar/Breakout-v1"])
@pytest.mark.parametrize(("index", "value"), [(-1, 2**40), (-1, -1), (-2, 2**40)])
def test_invalid_kernel_generators_are_rejected(env_id: str, index: int, value: int) -> None:
    with pytest.raises(ValueError, match="generators"):
        restore(env_id, lambda simulation: simulation["generators"][0, index].fill_(value))


@pytest.mark.parametrize("value", [-1, 10**6])
def test_elapsed_steps_beyond_the_time_limit_are_rejected(value: int) -> None:
    with pytest.raises(ValueError, match="elapsed"):
        restore("CartPole-v1", lambda simulation: simulation["elapsed"].fill_(value))


@pytest.mark.parametrize("env_id", OUT_OF_RANGE)
def test_every_kernel_integer_has_a_range(env_id: str) -> None:
    if env_id.startswith("MinAtar"):
        pytest.importorskip("minatar")
    kernel = KernelBackend(settings(env_id), seed=1).kernel
    assert all(most - least < 2**33 for least, most in kernel.int_ranges)


def test_a_kernel_with_an_empty_range_is_rejected() -> None:
    from gymnasium import spaces

    with pytest.raises(ValueError, match="cannot be 3 to 2"):
        Kernel(print, (1,), spaces.Discrete(2), int_state=((3, 2),))


def test_an_invalid_torch_generator_is_rejected() -> None:
    generator = torch.Generator().manual_seed(0)
    torch.rand(1000, generator=generator)
    state = generator.get_state()
    torch_generator(state, state)
    wrong = state.clone()
    wrong[8:12] = torch.tensor([112, 2, 0, 0])  # "624 words left" is out of range
    with pytest.raises(ValueError, match="left after"):
        torch_generator(wrong, state)
    with pytest.raises(ValueError, match="saved as"):
        torch_generator(state.long(), state)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("has_uint32", 2),
        ("uinteger", 2**32),
        ("bit_generator", "MT19937"),
        ("state", {}),
        ("uinteger", -1),
    ],
)
def test_an_invalid_numpy_generator_is_rejected(key: str, value: object) -> None:
    generator = np.random.Generator(np.random.PCG64(0))
    state = dict(generator.bit_generator.state)
    assert numpy_generator(state) == state
    with pytest.raises(ValueError):
        set_numpy_generator(generator, state | {key: value})


def floats(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    "layers",
    [
        [Layer(floats(4, 8), floats(8)), Layer(floats(9, 2), floats(2))],
        [Layer(floats(4, 8), floats(7))],
        [Layer(floats(4, 8), floats(8), norm=(floats(7), floats(8)))],
        [Convolution(floats(2, 1, 3, 3), floats(3), (5, 5)), Layer(floats(18, 2), floats(2))],
        [Convolution(floats(2, 1, 6, 3), floats(2), (5, 5))],
        [Convolution(floats(2, 1, 3, 3), floats(2), (5, 5)), Layer(floats(17, 2), floats(2))],
    ],
)
def test_host_layers_of_mismatched_shapes_are_rejected(layers: list[Layer | Convolution]) -> None:
    with pytest.raises(ValueError, match="layer"):
        HostNetwork(layers, "relu")


def test_host_network_inputs_of_another_size_are_rejected() -> None:
    network = HostNetwork([Layer(floats(4, 8), floats(8))], "relu")
    with pytest.raises(ValueError, match="4 inputs, but 3 were given"):
        network(floats(2, 3))


@pytest.mark.machinery
@pytest.mark.parametrize("change", [{"stride": (2, 2)}, {"padding": (1, 1)}, {"dilation": (2, 2)}])
def test_unsupported_convolutions_do_not_run_on_the_host_network(change: dict[str, object]) -> None:
    network = QNetwork((4, 10, 10), "uint8", 3, (8,), False)
    convolutions = [each for each in network.modules() if isinstance(each, torch.nn.Conv2d)]
    assert q_on_host(network) is not None and len(convolutions) == 1
    for name, value in change.items():
        setattr(convolutions[0], name, value)
    assert q_on_host(network) is None


@pytest.mark.parametrize("name", ALGORITHMS)
def test_sampled_poisoned_values_are_rejected_or_harmless(tmp_path: Path, name: str) -> None:
    with resumable(tmp_path, (*CASES[name], *IN_PROCESS), quick=False) as (saver, path):
        original = {each.name: each.read_bytes() for each in path.iterdir()}
        outcomes = Counter()
        of_parts = [
            each
            for each in poisons(path)
            if each.file != "manifest.json" and EXTRA not in each.where  # mostly harmless
        ]
        for poison in random.Random(0).sample(of_parts, 100):
            poison.spoil(path)
            outcomes[outcome(saver)] += 1
            for each, content in original.items():
                (path / each).write_bytes(content)
        assert outcome(saver) == "taken"
    assert outcomes["refused"] > 80 and sum(outcomes.values()) == 100


def named(found: list[Poison], *words: str) -> list[Poison]:
    return [each for each in found if all(word in str(each) for word in words)]


@pytest.mark.long
@pytest.mark.parametrize("name", ALGORITHMS)
def test_poisoned_values_end_the_command_with_3(tmp_path: Path, name: str) -> None:
    poisoned = Poisoned(tmp_path, name)
    assert poisoned.end(None) == "same", poisoned.said()
    chosen = [
        *named(poisoned.poisons, "run.json: steps", "nan"),
        *named(poisoned.poisons, "env.json: backend.episode.0", "= -1"),
        *named(poisoned.poisons, "env.safetensors", "frames", "others"),
        *named(poisoned.poisons, "optimizer_state.step", "one -1"),
    ]
    assert len(chosen) >= 4
    for poison in chosen:
        assert poisoned.end(poison) == "refused", f"{poison}: {poisoned.said()}"
        assert "Traceback" not in poisoned.said()


@pytest.mark.parametrize("value", [None, 5, "no hash", "A" * 64, []])
def test_an_invalid_hash_of_the_teacher_is_a_damaged_checkpoint(value: object) -> None:
    action = DiscreteActions(2)
    guide = TeacherGuide(
        ObjectTeacher("pole_teacher:Pole", action, Pole().act),
        build_head(action, torch.device("cpu")),
        Schedule(1.0, 0.0, "linear", 100),
        num_envs=2,
        seed=0,
        now=lambda: 0,
    )
    state = guide.state_dict()
    guide.load_state_dict(state)
    with pytest.raises(ValueError, match=r"teacher_guide\.teacher"):
        guide.load_state_dict({**state, "teacher": value})
    with pytest.raises(TeacherError, match="other weights"):
        guide.load_state_dict({**state, "teacher": "a" * 64})


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_poisoned_value_is_rejected_or_harmless(tmp_path: Path, name: str) -> None:
    if "image" in name or "memory" in name:
        pytest.importorskip("minatar")
    poisoned = Poisoned(tmp_path, name)
    assert poisoned.end(None) == "same", poisoned.said()
    outcomes, wrong = Counter(), []
    chosen = some_of_each(poisoned.poisons, VALUES_EACH)
    places = len({(each.file, each.where) for each in poisoned.poisons})
    with poisoned.screened() as end:
        for poison in chosen:
            found = end(poison)
            outcomes[found] += 1
            if found not in ("same", "refused"):
                wrong.append(f"{found}: {poison}: {poisoned.said()}")
    print(f"{name}: {len(chosen)} poisoned states: {dict(outcomes)}")
    assert len({(each.file, each.where) for each in chosen}) == places
    assert len(chosen) >= 1000 / len(CASES)  # of all cases together
    assert not wrong, "\n".join(wrong[:20])
