"""List, show and verify checkpoints, and export policies.

python scripts/checkpoint.py list RUN
python scripts/checkpoint.py verify RUN
python scripts/checkpoint.py export RUN --out policy.safetensors
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from steadyrl.core.errors import exit_on_error, one_line, printable
from steadyrl.training.checkpoints.manifest import (
    MANIFEST,
    CheckpointError,
    manifest_metadata,
    manifest_of,
    saved_at,
    saved_below,
    verified_metadata,
)
from steadyrl.training.checkpoints.run_directory import (
    BEST,
    CHECKPOINTS,
    LAST,
    linked_checkpoints,
    similar,
)
from steadyrl.training.cli.policy_files.export import (
    add_export_arguments,
    export,
    validate_export,
)
from steadyrl.training.cli.programs import documented_parser
from steadyrl.training.config.overrides import flatten
from steadyrl.training.logging.terminal import safe_stdout, score
from steadyrl.training.policies.find import PolicyError

AGAIN = (
    "saved again at this step, after the last evaluation or by a resumed run; "
    "the highest number is the newest"
)


def archives(path: Path) -> list[Path]:
    """Return a run's checkpoints, newest first, and policies; or `path` if it is one of these."""
    if not os.path.exists(path):
        raise PolicyError(f"{path}: no such run{similar(path)}")
    if (path / MANIFEST).exists():
        return [path]
    checkpoints = [saved.path for saved in saved_below(path / CHECKPOINTS)]
    found = checkpoints + [path / name for name in (LAST, BEST) if (path / name).is_dir()]
    if not found:
        raise PolicyError(f"{path}: neither checkpoints nor a policy")
    return found


def list_all(args: argparse.Namespace) -> None:
    """Print a table of a run's checkpoints and policies."""
    found = archives(args.path)
    print("| name | step | evaluated return | replay | MB | files |")
    print("|---|---:|---:|---|---:|---:|")
    for path in found:
        print(printable(_line(path)))
    again = [path.name for path in found if (saved := saved_at(path)) and saved.attempt > 1]
    if again:
        print(f"\n{again[0]}: {AGAIN}")


def _line(path: Path) -> str:
    try:
        manifest = manifest_of(path)
    except CheckpointError as error:
        return f"| {path.name} | {one_line(str(error))} | | | | |"
    metadata, files = manifest["metadata"], manifest["files"]
    value, size = metadata.get("eval_return_mean"), sum(entry["bytes"] for entry in files.values())
    shown = score(value) if isinstance(value, int | float) else ""
    replay = "yes" if metadata.get("replay") else ""
    step = one_line(str(metadata.get("step")))
    return f"| {path.name} | {step} | {shown} | {replay} | {size / 1e6:.2f} | {len(files)} |"


def show(args: argparse.Namespace) -> None:
    """Print the metadata of the newest checkpoint, or of the given one."""
    path = archives(args.path)[0]
    metadata = manifest_metadata(path)
    print(printable(f"{path}"))
    for key, value in flatten({key: metadata[key] for key in metadata if key != "weights"}):
        print(f"  {one_line(key)}: {one_line(json.dumps(value))}")


def verify(args: argparse.Namespace) -> None:
    """Check all hashes; exit with 3 if a file is corrupted or a checkpoint is a link."""
    wrong = 0
    for path in archives(args.path):
        try:
            verified_metadata(path)
            print(printable(f"{path.name}: valid"))
        except CheckpointError as error:  # check the others too
            wrong += 1
            print(printable(f"{path.name}: {one_line(str(error))}"))
    linked = linked_checkpoints(args.path)
    for path in linked:
        print(printable(f"{path.name}: a link, which no run reads"))
    if wrong:
        raise CheckpointError(f"{args.path}: {wrong} corrupted; restore or delete them")
    if linked:
        raise CheckpointError(
            f"{args.path}: {len(linked)} linked; put what they name in their place"
        )


COMMANDS = {"list": list_all, "show": show, "verify": verify, "export": export}


@exit_on_error()
def main(arguments: Sequence[str] | None = None) -> None:
    """Run a subcommand; errors are printed as one line."""
    parser = documented_parser(__doc__)
    subparsers = parser.add_subparsers(required=True, metavar="command")
    for name, run in COMMANDS.items():
        sub = subparsers.add_parser(name, help=(run.__doc__ or "").splitlines()[0])
        sub.set_defaults(run=run)
        if run is export:
            add_export_arguments(sub)
        else:
            what = "run directory, or one of its checkpoints or policies"
            sub.add_argument("path", type=Path, metavar="RUN", help=what)
    with safe_stdout():
        args = parser.parse_args(arguments)
        if args.run is export:
            validate_export(parser, args)
        args.run(args)
