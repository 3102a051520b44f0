"""Pictures of curves, written whole or not at all."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadyrl.core.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_figure(figure: Figure, path: Path, **options: Any) -> None:
    """Write a figure in the format of the path's suffix; an existing file stays until it is."""
    drawn = BytesIO()
    figure.savefig(drawn, format=path.suffix[1:], **options)
    write_atomic(path, drawn.getvalue())
