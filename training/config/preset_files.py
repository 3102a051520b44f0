"""File and line in which somebody's preset sets a key, for errors about its value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml  # type: ignore[import-untyped]
from hydra.core.hydra_config import HydraConfig

from steadyrl.core.files import read_regular
from steadyrl.training.config.overrides import key_of
from steadyrl.training.config.settings import CONFIGS

LARGEST = 1_000_000  # bytes of a preset


def preset_place(key: str, typed: Sequence[str]) -> tuple[str, ...]:
    """Return `(FILE, line N,)` of the chosen preset that sets a key; () if none does.

    SteadyRL's own presets are left out, and keys that the command line sets.
    """
    names = {key_of(text) for text in typed}
    if key in names:
        return ()
    for group, file in _chosen_files():
        for path in (key, key.removeprefix(f"{group.replace('/', '.')}.")):
            line = _line_of(file, path.split("."))
            if line:
                return (f"{file}, line {line}",)
    return ()


def preset_folder() -> Path | None:
    """Return the folder of `--config-dir`."""
    sources = HydraConfig.get().runtime.config_sources
    return next((Path(each.path) for each in sources if each.provider == "command-line"), None)


def _chosen_files() -> Iterator[tuple[str, Path]]:
    """Yield (group, file) of the presets outside of SteadyRL that are chosen, experiment first."""
    runtime = HydraConfig.get().runtime
    folders = [Path(each.path) for each in runtime.config_sources if each.schema == "file"]
    choices = sorted(runtime.choices.items(), key=lambda item: item[0] != "experiment")
    for group, name in choices:
        group = group.partition("@")[0]
        files = (folder / group / f"{name}.yaml" for folder in folders if folder != CONFIGS)
        yield from ((group, file) for file in files if file.is_file())


def _line_of(file: Path, path: Sequence[str]) -> int:
    """Return the line of a YAML file that sets a key; 0 if none does."""
    try:
        node = yaml.compose(read_regular(file, LARGEST, follow=True).decode(), yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError):
        return 0
    line = 0
    for name in path:
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        found = [(key, value) for key, value in pairs if key.value == name]
        if not found:
            return 0
        key, node = found[-1]
        line = key.start_mark.line + 1
    return line
