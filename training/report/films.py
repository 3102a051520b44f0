"""The videos of runs: small ones in the page itself, the others as links."""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from steadyrl.core.files import read_regular
from steadyrl.training.analysis.past_runs import PastRun

LARGEST = 1_000_000  # bytes of a film in the page
MOST = 4  # films in the page, the newest of each run
MOST_LINKS = 12  # of a run
KINDS = {".mp4": "video/mp4", ".gif": "image/gif"}


def films(runs: Sequence[PastRun], place: Path) -> str:
    """Return the section of films, as a page in the directory `place`; "" if there are none."""
    found = {run: paths for run in map(lambda each: each.path, runs) if (paths := _paths(run))}
    embedded: list[str] = []
    links: list[str] = []
    for run, paths in found.items():
        film = _embedded(paths[-1]) if len(embedded) < MOST else None
        if film is not None:
            embedded.append(
                f"<figure><figcaption>{_name(run, paths[-1])}</figcaption>{film}</figure>"
            )
        linked = paths if film is None else paths[:-1]
        links += [f"<li>{_link(run, path, place)}</li>" for path in linked[-MOST_LINKS:]]
    if not found:
        return ""
    return f"<h2>Films</h2><div class=charts>{''.join(embedded)}</div><ul>{''.join(links)}</ul>"


def _paths(run: Path) -> list[Path]:
    try:
        entries = sorted((run / "videos").iterdir())
    except OSError:
        return []
    return [path for path in entries if path.suffix in KINDS and path.name[0] != "."]


def _embedded(path: Path) -> str | None:
    try:
        data = b64encode(read_regular(path, LARGEST)).decode()
    except OSError:
        return None
    kind = KINDS[path.suffix]
    source = f'src="data:{kind};base64,{data}"'
    return (
        f"<video controls {source}></video>"
        if kind.startswith("video")
        else f"<img class=film alt='' {source}>"
    )


def _name(run: Path, path: Path) -> str:
    return escape(f"{run.name}: {path.name}")


def _link(run: Path, path: Path, place: Path) -> str:
    """Return a link that works where page and run are moved together."""
    target = quote(os.path.relpath(path.absolute(), place.absolute()))
    return f'<a href="{target}">{_name(run, path)}</a>'
