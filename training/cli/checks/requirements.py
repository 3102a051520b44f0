"""The packages that SteadyRL and its extras require, and which of them are installed."""

from __future__ import annotations

import tomllib
from importlib.metadata import metadata

from packaging.requirements import Requirement

from steadyrl.core.command.typed import PACKAGE, ROOT, installed_version, is_clone

ABOUT_DEVELOPMENT = ("dev", "peers")


def requirements() -> dict[str, list[Requirement]]:
    """Return the requirements of each extra, and under "" those of SteadyRL itself."""
    return _of_clone() if is_clone() else _of_installation()


def missing(wanted: list[Requirement]) -> list[str]:
    """Return the requirements that are not installed, or in another version, as text."""
    found = []
    for each in wanted:
        now = installed_version(each.name)
        if now is None:
            found.append(f"{each} is not installed")
        elif not each.specifier.contains(now, prereleases=True):
            found.append(f"{each} is required, {now} is installed")
        else:
            found += missing(
                [part for name in sorted(each.extras) for part in _of(each.name, name)]
            )
    return found


def extras() -> dict[str, bool]:
    """Return which extras are installed, without those for development."""
    return {
        name: not missing(wanted)
        for name, wanted in sorted(requirements().items())
        if name and name not in ABOUT_DEVELOPMENT
    }


def _of_clone() -> dict[str, list[Requirement]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lists = {"": project["dependencies"], **project["optional-dependencies"]}
    return {name: [Requirement(text) for text in texts] for name, texts in lists.items()}


def _of_installation() -> dict[str, list[Requirement]]:
    names = ["", *(metadata(PACKAGE).get_all("Provides-Extra") or ())]
    return {name: _of(PACKAGE, name) for name in names}


def _of(package: str, extra: str) -> list[Requirement]:
    """Return the requirements of an installed package's extra."""
    wanted = [Requirement(text) for text in metadata(package).get_all("Requires-Dist") or ()]
    return [each for each in wanted if _belongs(each, extra)]


def _belongs(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    if marker is None:
        return not extra
    return marker.evaluate({"extra": extra}) and not (extra and marker.evaluate({"extra": ""}))
