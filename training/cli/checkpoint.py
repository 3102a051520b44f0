"""List, show and verify checkpoints, and export policies.

python scripts/checkpoint.py list RUN
python scripts/checkpoint.py verify RUN
python scripts/checkpoint.py export RUN --out policy.safetensors
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steadyrl.core.errors import (
    ExpectedError,
    SettingError,
    describe,
    exit_on_error,
    one_line,
    printable,
)
from steadyrl.training.checkpoints.manifest import (
    MANIFEST,
    CheckpointError,
    manifest_metadata,
    manifest_of,
    saved_at,
    saved_below,
    verified_metadata,
)
from steadyrl.training.checkpoints.run_directory import BEST, LAST, similar
from steadyrl.training.cli.programs import documented_parser
from steadyrl.training.config.overrides import flatten
from steadyrl.training.logging.terminal import safe_stdout, score

AGAIN = "saved again at this step, by a resumed run for example; the highest number is the newest"
CHECKED_WITH = 64  # random observations on which an exported policy must choose the same actions


def archives(path: Path) -> list[Path]:
    """Return a run's checkpoints, newest first, and policies; or `path` if it is one of these."""
    if not os.path.exists(path):
        raise CheckpointError(f"{path}: no such run{similar(path)}")
    if (path / MANIFEST).exists():
        return [path]
    checkpoints = [saved.path for saved in saved_below(path / "checkpoints")]
    found = checkpoints + [path / name for name in (LAST, BEST) if (path / name).is_dir()]
    if not found:
        raise CheckpointError(f"{path}: neither checkpoints nor a policy")
    return found


def list_all(args: argparse.Namespace) -> None:
    """Print a table of a run's checkpoints and policies."""
    print("| name | step | evaluated return | replay | MB | files |")
    print("|---|---:|---:|---|---:|---:|")
    found = archives(args.path)
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
    """Check all hashes; exit with 3 if any file is corrupted."""
    wrong = 0
    for path in archives(args.path):
        try:
            verified_metadata(path)
            print(printable(f"{path.name}: valid"))
        except CheckpointError as error:  # check the others too
            wrong += 1
            print(printable(f"{path.name}: {one_line(str(error))}"))
    if wrong:
        raise CheckpointError(f"{args.path}: {wrong} corrupted; restore or delete them")


def export(args: argparse.Namespace) -> None:
    """Export a policy as a safetensors or ONNX file."""
    from safetensors import SafetensorError

    # Here: torch takes seconds.
    from steadyrl.training.policies.exported import SUFFIX, write_exported
    from steadyrl.training.policies.policy import read_policy

    policy = read_policy(args.path, best=args.best)
    for out in filter(None, (args.out, args.onnx)):
        if out.exists():
            raise SettingError("export", out, "exists already; choose another name")
    out = args.out
    try:
        if args.out is not None:
            write_exported(policy, args.out)
            print(printable(f"exported {policy.path} to {args.out}"))
            if args.out.suffix.lower() != SUFFIX:
                print(f"note: only files whose names end in {SUFFIX} can be loaded again")
        if args.onnx is not None:
            out = args.onnx
            _export_onnx(policy, args.onnx)
            print(printable(f"exported {policy.path} to {args.onnx} (same actions)"))
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        reason = f"cannot be written: {getattr(error, 'strerror', None) or describe(error)}"
        raise SettingError("export", out, reason) from None


def _export_onnx(policy: Any, out: Path) -> None:
    import torch

    from steadyrl.training.policies.policy import build_policy_module

    try:
        import onnx  # type: ignore[import-not-found]  # noqa: F401
        import onnxruntime  # type: ignore[import-not-found]
    except ModuleNotFoundError as error:
        reason = f"needs {error.name}: pip install onnx onnxruntime"
        raise SettingError("--onnx", out, reason) from None
    module, spec = build_policy_module(policy)
    shape = (CHECKED_WITH, *spec.observation_shape)
    generator = torch.Generator().manual_seed(0)
    if spec.dtype == "uint8":
        obs = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    else:
        obs = torch.randn(shape, generator=generator)
    axes = {"observation": {0: "n"}, "action": {0: "n"}}
    unchecked = out.with_name(f"{out.name}.unchecked")
    try:
        with warnings.catch_warnings():
            # The other exporter needs a second library and gives larger files.
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.onnx.export(
                module,
                (obs[:2],),
                str(unchecked),
                dynamo=False,
                input_names=list(axes)[:1],
                output_names=list(axes)[1:],
                dynamic_axes=axes,
            )
        session = onnxruntime.InferenceSession(str(unchecked), providers=["CPUExecutionProvider"])
        (there,) = session.run(None, {"observation": obs.numpy()})
        if not torch.allclose(torch.from_numpy(there).double(), module(obs).double(), atol=1e-4):
            raise CheckpointError(
                f"{policy.path}: the ONNX model chooses other actions; nothing was written"
            )
        os.rename(unchecked, out)
    except (OSError, ExpectedError):
        raise
    except Exception as error:  # of the exporter or ONNX Runtime, for networks of users
        reason = f"this policy cannot be exported: {describe(error)}"
        raise SettingError("--onnx", out, reason) from error
    finally:
        unchecked.unlink(missing_ok=True)


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `export`, which is a program of its own too."""
    what = "run directory, its policy/ or policy-best/, or a checkpoint"
    parser.add_argument("path", type=Path, metavar="RUN", help=what)
    parser.add_argument("--best", action="store_true", help="export policy-best/")
    parser.add_argument("--out", type=Path, help="write a safetensors file (.onnx: an ONNX file)")
    parser.add_argument("--onnx", type=Path, help="write an ONNX file, checked against PyTorch")


def validate_export(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with the parser's error unless a file is named; `--out x.onnx` means `--onnx x.onnx`."""
    if args.out is None and args.onnx is None:
        parser.error("needs --out FILE or --onnx FILE")
    if args.out is not None and args.out.suffix.lower() == ".onnx":
        if args.onnx is not None:
            parser.error(f"--out {args.out}: is an ONNX file, and --onnx names one too")
        args.out, args.onnx = None, args.out


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
