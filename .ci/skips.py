"""A plugin of pytest: a skip is a failure unless skips.txt lists it with its reason."""

from collections.abc import Iterator
from pathlib import Path

import pytest

LISTED = Path(__file__).with_name("skips.txt")


def listed(text: str) -> list[tuple[str, str]]:
    """Return (part of the name, part of the reason) of every skip that is right."""
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    found = []
    for line in lines:
        name, reason, why = (part.strip() for part in line.split("|"))
        if not (name and reason and why):
            raise ValueError(f"{LISTED}: name, reason and why are needed: {line}")
        found.append((name, reason))
    return found


class Skips:
    """Collect the skips that are not listed, and fail for them."""

    def __init__(self, right: list[tuple[str, str]]) -> None:
        self._right = right
        self.wrong: list[str] = []

    def _look(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(name in report.nodeid and part in reason for name, part in self._right):
            self.wrong.append(f"{report.nodeid}: {reason}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Look at a test that was skipped."""
        self._look(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Look at a file that was skipped."""
        self._look(report)

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        """Fail, if nothing else did."""
        yield
        if self.wrong and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name them."""
        for line in sorted(self.wrong):
            terminalreporter.write_line(f"SKIPPED, NOT LISTED in .ci/skips.txt: {line}")


def pytest_configure(config: pytest.Config) -> None:
    """Watch where all reports arrive: not in the workers of pytest-xdist."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Skips(listed(LISTED.read_text())), "unlisted-skips")
