"""What holds for every test: a skip says why, and the summary counts skips by reason, so that none goes unnoticed."""

from __future__ import annotations

from collections import Counter

import pytest

_NO_REASON = "unconditional skip"


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    longrepr = report.longrepr
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return str(text).removeprefix("Skipped: ")


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if not skipped:
        return
    terminalreporter.section(f"{len(skipped)} skipped", sep="-")
    for reason, count in Counter(map(_reason, skipped)).most_common():
        terminalreporter.write_line(f"{count:5d}  {reason}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or exitstatus != pytest.ExitCode.OK:
        return
    if any(_reason(report) == _NO_REASON for report in reporter.stats.get("skipped", [])):
        reporter.write_line("a test was skipped without a reason", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
