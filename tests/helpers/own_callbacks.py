"""Callbacks of a user."""

import os
import signal

import numpy as np

from steadyrl import Callback


class Recorder(Callback):
    """Records its calls; its state is what it has drawn and counted."""

    def __init__(self):
        self.events, self.counts = [], {"step": 0, "evaluation": 0, "checkpoint": 0}
        self.total, self.generator = 0.0, np.random.default_rng(0)

    def on_start(self, run):
        self.events.append(("start", run.step))

    def on_step(self, run):
        self.counts["step"] += 1
        self.total += self.generator.random()
        run.log("total", self.total)
        if run.step >= 40 and "STOP_AT_40" in os.environ:
            signal.raise_signal(signal.SIGTERM)

    def on_evaluation(self, run, evaluation):
        self.counts["evaluation"] += 1
        self.events.append(("evaluation", run.step, evaluation.episodes))
        run.log("longest", max(evaluation.lengths))

    def on_checkpoint(self, run):
        self.events.append(("checkpoint", run.step))
        self.counts["checkpoint"] += 1

    def on_end(self, run):
        self.events.append(("end", run.step, run.summary.status))

    def state_dict(self):
        counts = {k: v for k, v in self.counts.items() if k != "checkpoint"}
        return {"counts": counts, "total": self.total, "drawn": self.generator.bit_generator.state}

    def load_state_dict(self, state):
        self.counts |= state["counts"]
        self.total = state["total"]
        self.generator.bit_generator.state = state["drawn"]


class Stopper(Callback):
    """Stops at step 20."""

    def on_step(self, run):
        if run.step >= 20:
            run.stop("far enough")


class StopAt(Callback):
    """Stops at a step."""

    def __init__(self, step):
        self.step = step

    def on_step(self, run):
        if run.step >= self.step:
            run.stop()


class StopAt500(StopAt):
    def __init__(self):
        super().__init__(500)


class Wordless(Callback):
    def on_evaluation(self, run, evaluation):
        run.stop()


class Idle(Callback):
    """Has no state."""


class HalfStateful(Callback):
    def state_dict(self):
        return {"calls": 1}


class Watcher(Callback):
    """Records what it sees of the run."""

    def __init__(self):
        self.seen = []

    def on_start(self, run):
        self.run = run
        self.see("start", run)

    def on_step(self, run):
        run.log("number", run.step)
        run.log("number", -run.step)
        self.see("step", run)

    def on_end(self, run):
        self.see("end", run)

    def see(self, event, run):
        self.seen.append((event, run.step, run.return_mean, dict(run.metrics), run.summary))


class Faulty(Callback):
    """Fails in the method that the environment variable names."""

    def on_start(self, run):
        self.fail("on_start")

    def on_step(self, run):
        self.fail("on_step")

    def on_evaluation(self, run, evaluation):
        self.fail("on_evaluation")

    def on_checkpoint(self, run):
        self.fail("on_checkpoint")

    def on_end(self, run):
        self.fail("on_end")

    def state_dict(self):
        self.fail("state_dict")
        return {}

    def load_state_dict(self, state):
        pass

    def fail(self, where):
        if os.environ.get("FAILS_IN") == where:
            {}["missing"]  # FAILS HERE


class Unplain(Callback):
    def state_dict(self):
        return {"file": object()}


class NeedsArguments(Callback):
    def __init__(self, value):
        pass


instance = Stopper()
other = object()
