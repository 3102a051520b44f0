"""Every pair of switches that is not refused trains, is killed, and ends as if it had not been.

The rows are a pairwise covering array. A handful of them runs here in this process, all of them,
killed and continued as processes, in the slow tests.
"""

from itertools import combinations

import pytest
from command import ROOT
from covering import covering, pairs_of
from opened import job
from told_runs import in_one_and_in_two_parts

from steadyrl.core.errors import ExpectedError
from tests.test_killed import hold_killed_against_whole

# Each switch with its values, and what is typed for them; the first goes with everything.
BOTH = {
    "env": {
        "vectors": ("env=cartpole",),
        "pixels": ("env=minatar_breakout",),
        "masked": ("env=cartpole", "env.id=masked_envs:Doors-v0", "+env.kwargs.doors=6"),
        "masked pixels": (
            "env=cartpole",
            "env.id=masked_envs:StampedMasks-v0",
            "+env.kwargs.kind=image",
        ),
    },
    "backend": {name: (f"env.backend={name}",) for name in ("sync", "async", "kernel")},
    "frame_stack": {"1": (), "2": ("env.frame_stack=2",)},
    "teacher": {
        "none": (),
        "looks on": ("agent.teacher.policy=pole_teacher:Anywhere",),
        "leads": ("agent.teacher.policy=pole_teacher:Anywhere", "agent.teacher.acts=0.6"),
    },
    "grad_accumulation": {"1": (), "2": ("agent.grad_accumulation=2",)},
    "layer_norm": {"off": (), "on": ("agent.network.layer_norm=true",)},
    "precision": {"float32": (), "bf16": ("precision=bf16",)},
    "deterministic": {"off": (), "on": ("deterministic=true",)},
    "learning_rate": {"stays": (), "falls": ("agent.anneal_learning_rate=cosine",)},
}


def switch(*keys):
    """Return switches by the first part of their keys."""
    return {key.partition(".")[0]: {"off": (), "on": (f"agent.{key}=true",)} for key in keys}


SWITCHES = {
    "dqn": {
        **switch("double", "dueling", "munchausen.enabled", "noisy.enabled", "clip_reward"),
        "prioritized": {"off": (), "on": ("agent.replay.prioritized=true",)},
        "n_step": {"1": ("agent.n_step=1",), "3": ("agent.n_step=3",)},
        "distribution": {
            "none": (),
            "c51": (
                "agent.distribution.kind=c51", "agent.distribution.v_min=0",
                "agent.distribution.v_max=20", "agent.distribution.atoms=11",
            ),
            "quantile": ("agent.distribution.kind=quantile", "agent.distribution.atoms=7"),
        },
        "loss": {"huber": (), "squared": ("agent.loss=squared",)},
        "target": {"whole": (), "in part": ("agent.target_tau=0.1",)},
        **BOTH,
    },
    "ppo": {
        **switch("popart", "normalize_obs", "normalize_reward", "clip_value", "clip_reward"),
        "recurrent": {
            kind: (f"agent.recurrent.cell={kind}", "agent.recurrent.sequence_length=5")
            for kind in ("none", "gru", "lstm")
        },
        "rnd": {"off": (), "on": ("agent.rnd.coef=1",)},
        "target_kl": {"off": (), "on": ("agent.target_kl=0.001",)},
        "entropy": {"none": (), "falls": (
            "agent.entropy_coef=0.01", "agent.anneal_entropy_coef=linear",
        )},
        "minibatches": {"parts": (), "rows": ("agent.batch_size=20",)},
        "trunks": {"any": (), "shared": ("agent.shared_trunk=true",)},
        **BOTH,
        "env": {**BOTH["env"], "continuous": ("env=pendulum",)},
    },
}  # fmt: skip
MASKED = ("masked", "masked pixels")
REFUSED_OF_BOTH = [
    *((("env", env), ("backend", "kernel")) for env in MASKED),
]
REFUSED = {
    "dqn": [
        *((("loss", "squared"), ("distribution", kind)) for kind in ("c51", "quantile")),
        *REFUSED_OF_BOTH,
    ],
    "ppo": [
        *((("env", env), ("normalize_obs", "on")) for env in ("pixels", "masked pixels")),
        (("clip_reward", "on"), ("normalize_reward", "on")),
        *REFUSED_OF_BOTH,
    ],
}

AGENTS = {
    "dqn": (
        "agent=dqn", "agent.learning_starts=60", "agent.train_every=8", "agent.target_every=100",
        "agent.updates_per_train=1", "agent.batch_size=16", "agent.replay.capacity=700",
    ),
    "ppo": (
        "agent=ppo", "agent.rollout_steps=32", "agent.epochs=2", "agent.minibatches=3",
        "agent.anneal_learning_rate=constant",
    ),
}  # fmt: skip
SMALL = ("env.num_envs=2", "env.max_restarts=0", "device=cpu", "agent.hidden=[16]")
ROWS = {
    name: covering({k: list(values) for k, values in switches.items()}, REFUSED[name])
    for name, switches in SWITCHES.items()
}


def typed(name, row, compiled="false"):
    """Return the overrides of a row; what it says not is as in the first values."""
    chosen = [values[row.get(k, next(iter(values)))] for k, values in SWITCHES[name].items()]
    asked = [part for parts in chosen for part in parts]
    return (*AGENTS[name], *SMALL, *asked, f"agent.compile={compiled}")


def test_every_pair_stands_in_a_row_of_few_and_no_forbidden_one_does():
    for name, switches in SWITCHES.items():
        items = [[(factor, value) for value in values] for factor, values in switches.items()]
        every = {
            frozenset((a, b)) for one, other in combinations(items, 2) for a in one for b in other
        }
        forbidden = {frozenset(pair) for pair in REFUSED[name]}
        assert forbidden < every
        assert set().union(*map(pairs_of, ROWS[name])) == every - forbidden
        assert len(ROWS[name]) < 25


@pytest.mark.parametrize("name", AGENTS)
def test_what_no_row_holds_is_refused_by_the_program(tmp_path, name):
    for pair in REFUSED[name]:
        with pytest.raises(ExpectedError) as refused:
            job(tmp_path, *typed(name, dict(pair)), quick=False)
        assert refused.value.exit_code == 2, pair


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize("place", [0, 1])
def test_a_row_in_two_parts_is_the_same_as_in_one(tmp_path, name, place):
    row = ROWS[name][place] | {"backend": "sync"}  # processes take seconds to start
    asked = (*typed(name, row), "total_steps=300", "eval.every=100", "log.every=100")
    told = job(tmp_path, *asked, quick=False)
    run, second, whole, parts = in_one_and_in_two_parts(told, 170)
    assert parts == whole and run.summary.updates > 5
    assert second.summary.weights_sha256 == run.summary.weights_sha256


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("name", AGENTS)
def test_kills_change_no_row(tmp_path, name, compiled):
    steps = ("total_steps=2000", "eval.every=900", "checkpoint.every=200", "log.every=300")
    failed = []
    for place, row in enumerate(ROWS[name]):
        folder, asked = tmp_path / str(place), (*typed(name, row, compiled), *steps)
        folder.mkdir()
        try:
            hold_killed_against_whole(folder, asked, kills=1)
            print(name, place, "the same")
        except AssertionError as error:
            failed.append(f"{row}\n{ROOT / 'train.py'} {' '.join(asked)}\n{error}")
            print(name, place, "FAILED\n", failed[-1])
    assert not failed, "\n\n".join(failed)
