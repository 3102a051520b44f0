"""`benchmark.py dqn|ppo`: where the time of a step or an iteration goes."""

import re

from scripts.benchmarks import agents
from scripts.benchmarks.measuring import ours


def parts(printed):
    return {name: float(value) for name, value in re.findall(r"(\w+) (\d+\.\d+)(?:  |$)", printed)}


def test_the_ppo_breakdown_has_every_part_of_an_iteration(capsys):
    work = agents.Work(2, 64, 2)
    shape = ("env.num_envs=2", "agent.rollout_steps=64", "agent.minibatches=2")
    with ours(*agents.PPO_WORK, *shape, *agents.PPO_OURS["sync eager"]) as one:
        agents._ppo_breakdown("sync eager", one, work, 2)
    found = parts(capsys.readouterr().out.splitlines()[-1])
    assert {"act", "env", "store", "rows", "GAE", "update", "log", "rest"} <= set(found)
    assert min(found["act"], found["env"], found["GAE"], found["update"]) > 0
    assert found["rest"] >= 0, "a part is within another"


def test_the_dqn_breakdown_has_every_part_of_a_step(capsys):
    with ours(*agents.WORK, *agents.OURS["eager uniform"], "agent.learning_starts=200") as one:
        agents._breakdown("eager uniform", one, 400)
    found = parts(capsys.readouterr().out.splitlines()[-2])
    assert min(found["sample"], found["update"]) > 0
    assert found["rest"] >= 0, "a part is within another"
