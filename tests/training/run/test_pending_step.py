"""The decision that a finished run leaves: checked like all state before a run goes on with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from logged_runs import Lines, opened
from opened import job
from poison import DQN, PPO, Poison, every, one

from steadyrl.agents.base import Decision
from steadyrl.envs.types import Step
from steadyrl.training.run.pending_step import PendingStep
from steadyrl.training.setup import build
from tests.training.checkpoints.test_hostile_state import outcome, resumable

RUN = ("env=cartpole", "env.num_envs=2", "total_steps=120", "eval.every=0", "device=cpu",
       "checkpoint.keep=1", "checkpoint.every=60")  # fmt: skip


TENSORS = [
    ("env_action", one(2)),  # CartPole has two actions
    ("env_action", one(-1)),
    ("env_action", every(2**40)),
    ("env_action", lambda action: action[:1]),
    ("env_action", lambda action: action.float()),
    ("obs", one(0.25)),  # not what the environments observe
    ("obs", one(float("nan"))),
    ("obs", lambda obs: obs.double()),
    ("obs", lambda obs: obs[:, :3]),
]
OTHERS = [
    Poison("run.safetensors", (f"pending.content.decision.{name}",), "", change)
    for name, change in TENSORS
] + [
    Poison("run.json", ("pending", "content", where), "", value)
    for where in ("decision", "step")
    for value in (7, [], {})
]


@pytest.mark.parametrize("backend", ["sync", "kernel"])
def test_another_decision_than_the_environments_can_take_is_refused(tmp_path, backend):
    with resumable(tmp_path, (*RUN, *DQN, f"env.backend={backend}"), quick=False) as found:
        saver, path = found
        content = json.loads((path / "run.json").read_text())["pending"]["content"]
        assert content["step"] is None and outcome(saver) == "taken"
        whole = shutil.copytree(path, tmp_path / "whole")
        for other in OTHERS:
            other.spoil(path)
            assert outcome(saver) == "refused", other
            shutil.rmtree(path)
            shutil.copytree(whole, path)
        assert outcome(saver) == "taken"


def test_an_agent_that_learns_after_a_step_leaves_no_decision(tmp_path: Path) -> None:
    run_job = job(tmp_path, *RUN, *PPO, quick=False)
    with build(run_job) as (env, agent):
        env.reset()
        run = opened(run_job, agent, Lines())
        run.check_consistency(0, env)
        obs = torch.from_numpy(np.array(env.observation))
        run._pending.content = Decision(obs, torch.zeros(2, dtype=torch.int64)), None
        with pytest.raises(ValueError, match="step: is missing"):
            run.check_consistency(0, env)


def test_errors_name_the_value_that_is_missing_or_wrong() -> None:
    """Names that a later version may add are ignored."""
    decision = Decision(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
    flag = np.zeros(2, dtype=np.bool_)
    step = Step(np.zeros((2, 4), np.float32), np.zeros(2, np.float32), flag, flag, flag, ())
    pending, other = (PendingStep(torch.device("cpu")) for _ in range(2))
    pending.content = decision, step
    state = pending.state_dict()["content"]
    other.load_state_dict({"content": {**state, "decision": {**state["decision"], "new": 1}}})
    assert other.received is not None and torch.equal(other.received[0].obs, decision.obs)
    for part in ("decision", "step"):
        for name in state[part]:
            wrong = {**state, part: {k: v for k, v in state[part].items() if k != name}}
            with pytest.raises(ValueError, match=rf"pending\.content\.{part} has no {name}"):
                other.load_state_dict({"content": wrong})
            wrong = {**state, part: {**state[part], name: 7}}
            with pytest.raises(ValueError, match=rf"pending\.\S*{part}\.{name}:"):
                other.load_state_dict({"content": wrong})
        assert other.content is None
