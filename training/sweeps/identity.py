"""Which jobs of sweeps are the same run: the settings that define a run, and their hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from steadyrl.core.errors import SettingError
from steadyrl.training.config.overrides import ABOUT_THE_RUN, flatten, is_mutable
from steadyrl.training.config.settings import completed, load_settings


def counted(values: Mapping[str, Any], swept: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings that define a run, by full key.

    Values are converted: 1e5 is 100000. Keys in `swept` always count; keys missing in `values` get
    their defaults.
    """
    found = completed(values)
    with suppress(SettingError):  # invalid: the job itself will report it
        found = load_settings(found).values()
    keys = {
        key: value
        for key, value in flatten(found)
        if key in swept
        or (key not in ABOUT_THE_RUN and (key == "total_steps" or not is_mutable(key)))
    }
    if found.get("init_from") is not None:
        keys["init_from"] = found["init_from"]
    return keys


def digest(keys: Mapping[str, Any]) -> str:
    """Return the hash of settings; of those `counted`, equal for configurations of the same run."""
    text = json.dumps(keys, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
