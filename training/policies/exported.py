"""A policy in one safetensors file, as `export --out policy.safetensors` writes it.

Reading it runs no code. Files that may do so (pickles: `.pt`, `.zip`, …) are refused unread.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from safetensors.torch import save

from steadyrl.core.command.typed import command_of
from steadyrl.core.files import write_atomic
from steadyrl.core.safe_parsing import from_json
from steadyrl.training.checkpoints.archive import read_header, read_tensors
from steadyrl.training.checkpoints.formats import FORMAT
from steadyrl.training.checkpoints.manifest import CheckpointError, FormatError, open_saved
from steadyrl.training.policies.find import EXPORTED, Policy, PolicyError
from steadyrl.training.policies.policy import CheckedPolicy

ABOUT = "__metadata__"  # the header's key of texts


def write_exported(policy: CheckedPolicy, out: Path) -> None:
    """Write a policy's weights and metadata to one file."""
    about = {"format": FORMAT, **policy.metadata}
    texts = {key: json.dumps(value) for key, value in about.items()}
    # `save_file` lets nobody else read it, and leaves a part on a full disk.
    write_atomic(out, save(policy.weights, metadata=texts))


def read_exported(path: Path) -> CheckedPolicy:
    """Read and check an exported policy."""
    if path.suffix.lower() != EXPORTED:
        raise _not_loaded(path)
    with open_saved(path) as file:
        size = os.fstat(file.fileno()).st_size
    header = read_header(path, size)
    try:
        texts = from_json(header)[ABOUT]
        metadata = {key: from_json(text.encode()) for key, text in texts.items()}
    except (ValueError, KeyError, AttributeError):
        reason = "is not an exported policy; name the run, or the folder of its policy"
        raise CheckpointError(f"{path}: {reason}") from None
    if metadata.pop("format", None) != FORMAT:
        raise FormatError(f"{path}: was exported by another version: export its policy again")
    most = Policy(path, metadata).nbytes

    def read() -> bytes:
        with open_saved(path) as file:
            return file.read(size)

    weights = read_tensors(path, header, size, most, read)
    return CheckedPolicy(path, metadata, weights=weights)


def _not_loaded(path: Path) -> PolicyError:
    what = "is no exported policy, and other files can run code when they are loaded"
    if path.suffix.lower() == ".onnx":
        what = "is for ONNX Runtime, and does not say how observations are encoded"
    export = f"{command_of('export')} RUN --out policy{EXPORTED}"
    return PolicyError(f"{path}: {what}: name a run, its policy/, or a file of {export}")
