"""Export a policy as a safetensors or ONNX file.

python scripts/export.py RUN --out policy.safetensors
python scripts/export.py RUN --best --onnx policy.onnx

`--out policy.onnx` writes an ONNX file too. It takes observations as the network gets them, and is
checked against PyTorch, which needs: pip install onnx onnxruntime.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from steadyrl.core.errors import ExpectedError, SettingError, describe, exit_on_error, printable
from steadyrl.training.checkpoints.manifest import CheckpointError
from steadyrl.training.cli.programs import documented_parser, validate_out
from steadyrl.training.logging.terminal import safe_stdout
from steadyrl.training.policies.find import EXPORTED

if TYPE_CHECKING:
    from steadyrl.envs.types import EnvSpec
    from steadyrl.training.policies.policy import PolicyModule
    from steadyrl.training.policies.spaces import Spaces

ONNX = ".onnx"
# Endings that are formats of weights: any other text behind a dot is part of a file's name.
PICKLES = (".pt", ".pth", ".pt2", ".ckpt", ".bin", ".zip", ".pkl", ".pickle", ".joblib")
ARRAYS = (".st", ".safetensor", ".npy", ".npz", ".h5", ".hdf5", ".keras", ".pb", ".tflite")
FORMATS = frozenset((EXPORTED, ONNX, *PICKLES, *ARRAYS))
CHECKED_WITH = 64  # random observations on which an exported policy must choose the same actions
# Ends what torch says of an operator; nodes of its graph follow.
AFTER_OPERATOR = re.compile(r"\.? (?:Please feel free|\[Caused by)")


def export(args: argparse.Namespace) -> None:
    """Export a policy as a safetensors or ONNX file."""
    from safetensors import SafetensorError

    # Here: torch takes seconds.
    from steadyrl.training.policies.exported import write_exported
    from steadyrl.training.policies.policy import build_policy_module, read_policy
    from steadyrl.training.policies.spaces import spaces_for

    policy = read_policy(args.path, best=args.best)
    for option, out in (("--out", args.out), ("--onnx", args.onnx)):
        if out is not None and out.exists():
            raise SettingError(option, out, "exists already; choose another name")
    option, out = "--out", args.out
    if args.onnx is not None:
        try:
            module, spec = build_policy_module(policy)
        except SettingError as error:
            instead = f"write --out {_renamed(args.onnx, EXPORTED)}, which steadyrl.load reads"
            reason = f"the policy {error.reason}, which an ONNX file cannot hold: {instead}"
            raise SettingError("--onnx", args.onnx, reason) from None
        _validate_onnx_packages(args.onnx)  # before the other file is written
        _, about = spaces_for(policy)
    try:
        if args.out is not None:
            write_exported(policy, args.out)
            print(printable(f"exported {policy.path} to {args.out}"))
            if args.out.suffix.lower() != EXPORTED:
                print(f"note: only files whose names end in {EXPORTED} can be loaded again")
        if args.onnx is not None:
            option, out = "--onnx", args.onnx
            _export_onnx(module, spec, about, policy.path, args.onnx)
            print(printable(f"exported {policy.path} to {args.onnx} (same actions)"))
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        reason = f"cannot be written: {getattr(error, 'strerror', None) or describe(error)}"
        raise SettingError(option, out, reason) from None


def _validate_onnx_packages(out: Path) -> None:
    try:
        import onnx  # type: ignore[import-not-found]  # noqa: F401
        import onnxruntime  # type: ignore[import-not-found]  # noqa: F401
    except ModuleNotFoundError as error:
        reason = f"needs {error.name}: pip install onnx onnxruntime"
        raise SettingError("--onnx", out, reason) from None


def _renamed(file: Path, suffix: str) -> Path:
    """Return the file's name with the ending of another format."""
    if file.suffix.lower() in FORMATS:
        return file.with_suffix(suffix)
    return file.with_name(file.name + suffix)


def _export_onnx(
    module: PolicyModule, spec: EnvSpec, about: Spaces, policy: Path, out: Path
) -> None:
    import numpy as np
    import onnxruntime
    import torch

    from steadyrl.training.policies.env_policy import EnvPolicy

    exported = EnvPolicy(module, about.action)
    shape = (CHECKED_WITH, *spec.observation_shape)
    generator = torch.Generator().manual_seed(0)
    if spec.dtype == "uint8":
        obs = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    else:
        obs = torch.randn(shape, generator=generator)
    axes = {"observation": {0: "n"}, "action": {0: "n"}}
    unchecked = out.with_name(f"{out.name}.unchecked")
    try:
        with _without_graphs(), warnings.catch_warnings():
            # The other exporter needs a second library and gives larger files.
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.onnx.export(
                exported,
                (obs[:2],),
                str(unchecked),
                dynamo=False,
                input_names=list(axes)[:1],
                output_names=list(axes)[1:],
                dynamic_axes=axes,
            )
        _fix_action_shape(unchecked, exported(obs[:2]).shape[1:])
        session = onnxruntime.InferenceSession(str(unchecked), providers=["CPUExecutionProvider"])
        (there,) = session.run(None, {"observation": obs.numpy()})
        here = np.asarray(about.decoder.decode(module(obs).numpy()), about.action.dtype)
        if here.shape != there.shape or not np.allclose(there, here, atol=1e-4):
            raise CheckpointError(
                f"{policy}: the ONNX model chooses other actions; nothing was written"
            )
        os.rename(unchecked, out)
    except (OSError, ExpectedError):
        raise
    except Exception as error:  # of the exporter or ONNX Runtime, for networks of users
        what = AFTER_OPERATOR.split(describe(error))[0]
        reason = f"this policy cannot be exported: {what}"
        raise SettingError("--onnx", out, reason) from error
    finally:
        unchecked.unlink(missing_ok=True)


def _fix_action_shape(file: Path, shape: Sequence[int]) -> None:
    """Write the shape of one action to an ONNX file, where the exporter names it by a node."""
    import onnx

    model = onnx.load(str(file))
    sizes = model.graph.output[0].type.tensor_type.shape.dim[1:]
    for dimension, size in zip(sizes, shape, strict=True):
        dimension.dim_value = size
    onnx.save(model, str(file))


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `export`, also those of `checkpoint export`."""
    what = "run directory, its policy/ or policy-best/, or a checkpoint"
    parser.add_argument("path", type=Path, metavar="RUN", help=what)
    parser.add_argument("--best", action="store_true", help="export policy-best/")
    parser.add_argument("--out", type=Path, help="write a safetensors file (.onnx: an ONNX file)")
    parser.add_argument("--onnx", type=Path, help="write an ONNX file, checked against PyTorch")


def validate_export(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse a command that names no file, or one of another format.

    `--out x.onnx` means `--onnx x.onnx`.
    """
    if args.out is None and args.onnx is None:
        parser.error("needs --out FILE or --onnx FILE")
    if args.out is not None and args.out.suffix.lower() == ONNX:
        if args.onnx is not None:
            parser.error(f"--out {args.out}: is an ONNX file, and --onnx names one too")
        args.out, args.onnx = None, args.out
    for option, out, suffix in (("--out", args.out, EXPORTED), ("--onnx", args.onnx, ONNX)):
        if out is None:
            continue
        validate_out(out, option)
        if out.suffix.lower() in FORMATS - {suffix}:
            reason = f"is written as {suffix[1:]}: name it {_renamed(out, suffix)}"
            raise SettingError(option, out, reason)


@contextmanager
def _without_graphs() -> Iterator[None]:
    """Discard the graph that torch's C++ prints to stdout where it cannot export an operator."""
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


@exit_on_error()
def main(arguments: Sequence[str] | None = None) -> None:
    """Export as the command line says; errors are printed as one line."""
    parser = documented_parser(__doc__)
    add_export_arguments(parser)
    with safe_stdout():
        args = parser.parse_args(arguments)
        validate_export(parser, args)
        export(args)
