"""Let one run go on from another's checkpoint with other settings: what populations exploit."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.files import Files
from training.manifest import MANIFEST, CheckpointError, manifest_of, saved_below, seal


def branch(source: Path, target: Path, config: Mapping[str, Any]) -> int:
    """Give the new run in `target` the newest whole checkpoint of `source`; return its step.

    The files are the same ones, linked; only the configuration is another. Whether it fits the
    state is checked where the run is continued.
    """
    files, reasons = Files(), []
    for saved in saved_below(source / "checkpoints"):
        try:
            manifest = manifest_of(saved.path)
        except CheckpointError as error:
            reasons.append(str(error))
            continue
        manifest["facts"] = {**manifest["facts"], "config": dict(config), "eval_return_mean": None}
        manifest["sha256"] = seal(manifest)
        whole = target / "checkpoints" / saved.path.name
        if whole.exists():
            return saved.step
        temporary = whole.with_name(f".writing-{saved.path.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        os.makedirs(temporary)
        for name in manifest["files"]:
            files.link(saved.path / name, temporary / name)
        files.write(temporary / MANIFEST, json.dumps(manifest, indent=1).encode())
        files.sync_directory(temporary)
        files.rename(temporary, whole)
        files.sync_directory(whole.parent)
        return saved.step
    raise CheckpointError("; ".join(reasons) or f"{source}: has no checkpoint to go on from")
