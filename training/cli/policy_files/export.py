"""Export a policy as a safetensors or ONNX file.

python scripts/export.py RUN --out policy.safetensors
python scripts/export.py RUN --best --onnx policy.onnx

`--out policy.onnx` writes an ONNX file too. It takes observations as the network gets them, and is
checked against PyTorch, which needs: pip install onnx onnxruntime.
"""

from __future__ import annotations

from collections.abc import Sequence

from steadyrl.core.errors import exit_on_error
from steadyrl.training.cli.checkpoint import add_export_arguments, export, validate_export
from steadyrl.training.cli.programs import documented_parser
from steadyrl.training.logging.terminal import safe_stdout


@exit_on_error()
def main(arguments: Sequence[str] | None = None) -> None:
    """Export as the command line says; errors are printed as one line."""
    parser = documented_parser(__doc__)
    add_export_arguments(parser)
    with safe_stdout():
        args = parser.parse_args(arguments)
        validate_export(parser, args)
        export(args)
