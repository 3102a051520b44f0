"""Import modules of other people, and say in one line why that fails when it does."""

from __future__ import annotations

import importlib
import traceback
from types import ModuleType

from memory.errors import SettingError, describe, one_line


def import_foreign(module: str, field: str, value: str) -> ModuleType:
    """Import a module that a setting names; a refusal names the setting."""
    if not module or not all(part.isidentifier() for part in module.split(".")):
        raise SettingError(field, value, "before the colon stands a module, after it a name")
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a user's module may do anything
        what = describe(error)
        if isinstance(error, ModuleNotFoundError):
            what = str(error)
        elif isinstance(error, SyntaxError):  # its own text names the place as well
            what = f"SyntaxError: {error.msg}"
        reason = f"cannot import {module}: {what}{_where(error)}"
        raise SettingError(field, value, one_line(reason)) from error


def _where(error: BaseException) -> str:
    """Name the file and the line that an import failed in, if it began at all."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}, line {error.lineno})"
    ours = (__file__, importlib.__file__)
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if f.filename not in ours and not f.filename.startswith("<frozen")]
    return f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""
