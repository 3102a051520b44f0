"""Phases that last, seen on a real terminal of 80 columns: of runs, evaluations and recordings."""

import fcntl
import json
import subprocess
import sys

import pytest
import warm
from command import QUICK, ROOT, environment
from live_terminal import Terminal

RUN = (
    *(each for each in QUICK if not each.startswith(("env=", "total_steps="))),
    *("env.id=gates:Gated-v0", "env.backend=sync", "callbacks=[gates:Waits]", "run_dir=here"),
    *("total_steps=20", "log.every=4", "eval.every=4", "eval.episodes=2", "eval.num_envs=1"),
    *("agent.learning_starts=15", "agent.train_every=1"),
)

IMPORTED = ("--env", "id=gates:Gated-v0")


class Gates:
    """The gates of a folder, and the programs that wait there."""

    def __init__(self, folder):
        self.folder, self.terminals, self._locks = folder / "gates", [], {}
        self.folder.mkdir()
        self._at = folder

    def shut(self, *names):
        for name in names:
            self._locks[name] = (self.folder / name).open("w")
            fcntl.flock(self._locks[name], fcntl.LOCK_EX)

    def open(self, name):
        self._locks.pop(name).close()

    def terminal(self, *command, stdout=None):
        env = environment() | {"GATES": str(self.folder)}
        found = Terminal.of_command([sys.executable, *command], self._at, env, stdout)
        self.terminals.append(found)
        return found

    def run(self, *overrides):
        env = {"GATES": str(self.folder), "TERM": "xterm"}
        found = Terminal(lambda terminal: warm.Process(self._at, overrides, env, terminal))
        self.terminals.append(found)
        return found


@pytest.fixture
def gates(tmp_path):
    found = Gates(tmp_path)
    yield found
    for each in found.terminals:
        each.close()


def fits(line):
    return len(line.rstrip()) < 80


@pytest.mark.long
def test_each_phase_of_a_run_is_shown_while_it_lasts(gates):
    pytest.importorskip("av")
    gates.shut("build-1", "build-2", "build-3", "reset-2", "checkpoint", "after-2", "after-4")
    run = gates.run(*RUN, "eval.video_every=4")
    run.until("looking at the environment 0:0")
    gates.open("build-1")
    run.until("building the environments 0:0")
    gates.open("build-2")
    run.until("building the evaluation environments 0:0")
    gates.open("build-3")
    run.until("resetting the environments 0:0")
    gates.open("reset-2")
    run.until("saving a checkpoint 0:0")
    gates.open("checkpoint")
    run.until("learning begins at step 16 (agent.learning_starts=15)")
    gates.open("after-2")
    gates.shut("step-3", "render", "after-17")
    gates.open("after-4")
    assert fits(run.until("evaluating (2 episodes) 0:0"))
    gates.open("step-3")
    assert fits(run.until("recording a video 0:0"))
    gates.open("render")
    run.until("updating 0:0")
    gates.shut("checkpoint")
    gates.open("after-17")
    line = run.until("saving a checkpoint 0:0")
    assert fits(line) and "return 3.0" in line
    gates.open("checkpoint")
    text, code = run.rest()
    assert code == 0 and "Traceback" not in text and "finished after 20 steps" in text

    gates.shut("load", "reset-2", "step-2")
    again = ("resume=here", "total_steps=30", "env.id=gates:Gated-v0", "callbacks=[gates:Waits]")
    run = gates.run(*again)
    run.until("restoring the environments 0:0")
    gates.open("reset-2")
    run.until("restoring the environments 0:0")
    gates.open("step-2")
    run.until("loading the checkpoint 0:0")
    gates.open("load")
    text, code = run.rest()
    assert code == 0 and "resumed from step 20" in text and "learning begins" not in text, text


@pytest.mark.long
def test_an_evaluation_and_a_recording_are_shown_while_they_last(gates, tmp_path):
    warm.finished(warm.Process(tmp_path, RUN, {"GATES": str(gates.folder)}), tmp_path, code=0)
    gates.shut("torch", "build-1", "reset-1")
    command = (ROOT / "tests" / "helpers" / "gate.py", ROOT / "scripts" / "evaluate.py")
    scored = gates.terminal(*command, "here", "--json", *IMPORTED, stdout=subprocess.PIPE)
    scored.until("loading torch 0:0")
    gates.open("torch")
    scored.until("building the environments 0:0")
    gates.open("build-1")
    assert fits(scored.until("evaluating (2 episodes) 0:0"))
    gates.open("reset-1")
    assert json.loads(scored.process.stdout.read())["return_mean"] == 3.0  # only stdout has it
    assert scored.rest()[1] == 0
    gates.shut("reset-1")
    options = ("here", "--episodes", "3", "--out", "a.npz", *IMPORTED)
    recorded = gates.terminal(ROOT / "scripts" / "record.py", *options)
    recorded.until("recording 3 episodes 0:0")
    gates.open("reset-1")
    text, code = recorded.rest()
    assert code == 0 and "a.npz: 3 episodes, 9 steps" in text
