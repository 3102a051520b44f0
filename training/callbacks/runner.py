"""Find the callbacks that `callbacks` names, call them, and save their state."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from time import perf_counter
from typing import Any

import numpy as np
from typing_extensions import override

from steadyrl.core.errors import SettingError, nearest, one_line, with_place
from steadyrl.core.saved_state import Saved
from steadyrl.core.state import Stateful, to_plain
from steadyrl.envs.step_clock import StepClock
from steadyrl.envs.wrappers import import_user_module
from steadyrl.training.callbacks.callback import Callback, CallbackError, RunControl

log = logging.getLogger("steadyrl")

EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))

# Methods of other libraries' callbacks, and which of ours is called at such a time.
OTHERS = {
    "init_callback": "on_start",
    "on_training_start": "on_start",
    "on_rollout_start": "on_step",
    "on_rollout_end": "on_step",
    "on_training_end": "on_end",
}


def find_callbacks(names: Sequence[str]) -> tuple[Callback, ...]:
    """Return the callbacks of names `module:Name`; a class is built without arguments."""
    return tuple(validate_callback(_build(name), name) for name in names)


def given_callbacks(given: object) -> list[Callback]:
    """Return the callbacks of a caller; SettingError says what to write for anything else."""
    if isinstance(given, Callback):
        name = type(given).__name__
        raise SettingError("callbacks", f"{name}()", f"must be a list: callbacks=[{name}()]")
    if isinstance(given, str) or not isinstance(given, Iterable):
        reason = "must be a list of objects, such as callbacks=[MyCallback()]"
        raise SettingError("callbacks", one_line(repr(given)), reason)
    return [_validate_object(each) for each in given]


def _validate_object(found: object) -> Callback:
    if isinstance(found, type) and issubclass(found, Callback):
        name = found.__name__
        raise SettingError("callbacks", name, f"is a class, no object: write {name}()")
    if isinstance(found, str):
        reason = f'is a text: write it as an override, "callbacks=[{found}]"'
        raise SettingError("callbacks", found, reason)
    own = isinstance(found, Callback)
    return validate_callback(found, f"{type(found).__name__}()" if own else one_line(repr(found)))


def validate_callback(found: object, name: str) -> Callback:
    """Return a callback; raise SettingError for any other object."""
    if not isinstance(found, Callback):
        raise SettingError("callbacks", name, f"is a {type(found).__name__}, no steadyrl.Callback")
    for method in dir(found):
        ours = _never_called(found, method)
        if ours is not None:
            reason = f"defines {method}, which is never called: write {ours}"
            raise SettingError("callbacks", name, reason)
    return found


def _never_called(callback: Callback, method: str) -> str | None:
    """Return what to write for a method of another library, or a misspelt one; None: it is fine."""
    plain = method.lstrip("_")
    if method in EVENTS or not (plain.startswith("on_") or plain in OTHERS):
        return None
    near = get_close_matches(plain, EVENTS, n=1, cutoff=0.85)
    ours = OTHERS.get(plain, near[0] if near else None)
    if ours is None or not callable(getattr(type(callback), method, None)):
        return None
    if plain in EVENTS and getattr(type(callback), plain) is not getattr(Callback, plain):
        return None  # a helper of its own
    return f"{ours}(self, run{', evaluation' if ours == 'on_evaluation' else ''})"


def _build(name: str) -> object:
    module, _, attribute = name.rpartition(":")
    found = vars(import_user_module(module, "callbacks", name))
    if attribute not in found:
        offered = [k for k, v in found.items() if isinstance(v, type) and issubclass(v, Callback)]
        hint = f"; {nearest(attribute, offered)}" if offered else ""
        raise SettingError("callbacks", name, f"{module} has no {attribute or 'such name'}{hint}")
    given = found[attribute]
    try:
        # A copy: several runs of one process begin with the object as the module made it.
        return given() if isinstance(given, type) else copy.deepcopy(given)
    except (Exception, SystemExit) as error:  # user code
        what = "built" if isinstance(given, type) else "copied for this run"
        raise SettingError("callbacks", name, f"cannot be {what}: {with_place(error)}") from error


class Callbacks(Stateful):
    """The callbacks of a run, called in their order; their errors become CallbackErrors."""

    def __init__(self, callbacks: Sequence[Callback], control: RunControl) -> None:
        self._named = dict(zip(_names(callbacks), callbacks, strict=True))
        self._control = control
        self.clock = StepClock()
        self.seconds = 0.0  # in callbacks
        self.stopped_by: str | None = None  # which callback has asked to stop, and why
        self._has_finished = False  # the last steps are done: there is nothing to stop
        self.ended = False  # the run has, and the summary has its status

    def __bool__(self) -> bool:
        return bool(self._named)

    def notify(self, event: str, step: int, *arguments: object) -> None:
        """Call a method of all callbacks."""
        begin, control = perf_counter(), self._control
        control.step = step
        for name, callback in self._named.items():
            with self.clock, _errors_of(name, event, step):
                answer = getattr(callback, event)(control, *arguments)
            if isinstance(answer, bool | np.bool_) and not answer and control.stop_reason is None:
                control.stop(f"{event} returned False")
            if self._has_finished:
                control.stop_reason = None
            elif control.stop_reason is not None and self.stopped_by is None:
                self.stopped_by = f"{name}: {control.stop_reason}".removesuffix(": ")
        self.seconds += perf_counter() - begin

    def end(self, step: int, *, failed: bool = False) -> None:
        """Call `on_end` once; the error of a run that has `failed` goes before that of `on_end`."""
        if self.ended:
            return
        self.ended = True
        try:
            self.notify("on_end", step)
        except CallbackError as error:
            if not failed:
                raise
            log.warning("%s", error)
        finally:
            self._control.close()

    def complete(self, scalars: Mapping[str, float]) -> dict[str, float]:
        """Return the scalars of a log line with those of callbacks, who see all as `metrics`."""
        line, self._control.pending = {**scalars, **self._control.pending}, {}
        self._control.metrics |= line
        return line

    def pop_stop(self) -> str | None:
        """Return `stopped_by` and forget it: a finished run may be resumed for longer."""
        self._has_finished = True
        stopped, self.stopped_by, self._control.stop_reason = self.stopped_by, None, None
        return stopped

    @override
    def state_dict(self) -> dict[str, Any]:
        from steadyrl.training.checkpoints.plain import to_document  # here: torch takes seconds

        # None of those without a state: a resumed run warns of every callback that it lacks.
        states = dict.fromkeys(self._named)
        for name, callback in self._named.items():
            if hasattr(callback, "state_dict"):
                with _errors_of(name, "state_dict", self._control.step):
                    states[name] = to_plain(callback.state_dict())
                    to_document(states[name])  # raises if no checkpoint can hold it
        metrics = dict(self._control.pending)
        return {"states": states, "metrics": metrics, "stopped_by": self.stopped_by}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = Saved(state, "callbacks")
        states, metrics, stopped = (saved.raw(k) for k in ("states", "metrics", "stopped_by"))
        if not isinstance(states, dict) or not isinstance(metrics, dict):
            raise ValueError("are saved as something else than mappings")
        if not (stopped is None or isinstance(stopped, str)):
            raise ValueError("stopped_by: is no text")
        numbers = Saved(metrics, "metrics")
        # A mean of nothing yet is NaN: it is left out where it is logged.
        self._control.pending = {str(k): numbers.real(k, finite=False) for k in metrics}
        self.stopped_by = stopped
        self._warn_of_missing(states)
        for name, callback in self._named.items():
            own = states.get(name)
            if own is not None and hasattr(callback, "load_state_dict"):
                with _errors_of(name, "load_state_dict", self._control.step):
                    callback.load_state_dict(own)

    def _warn_of_missing(self, states: Mapping[str, Any]) -> None:
        """Warn of saved callbacks that this run does not have, or that take no state any more."""
        missing = [name for name in states if name not in self._named]
        if missing:
            given = ", ".join(self._named) or "none"
            log.warning(
                "callbacks: the run goes on without %s and what they had saved (given: %s)",
                ", ".join(missing), given,
            )  # fmt: skip
        for name, callback in self._named.items():
            if states.get(name) is not None and not hasattr(callback, "load_state_dict"):
                log.warning("callbacks: %s has no load_state_dict: it begins anew", name)


@contextmanager
def _errors_of(name: str, event: str, step: int) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:  # user code
        what = f"callback {name} failed in {event} at step {step:,}: {with_place(error)}"
        raise CallbackError(what) from error


def _names(callbacks: Sequence[Callback]) -> Iterator[str]:
    """Yield `module:Class` of each callback, numbered from the second of a class on."""
    counts: dict[str, int] = {}
    for callback in callbacks:
        name = f"{type(callback).__module__}:{type(callback).__qualname__}"
        counts[name] = counts.get(name, 0) + 1
        yield name if counts[name] == 1 else f"{name}#{counts[name]}"
