"""Hypothesis profiles, and the table of injected faults.

The suite repeats its examples; ``pytest --hypothesis-profile=explore`` looks for new ones. ``pytest --write-reports``
writes what the fault tests saw to ``reports/faults.md``.
"""

import signal
from pathlib import Path

import fault_report
import pytest
from hypothesis import settings

# no deadlines: they are timed assertions
settings.register_profile("suite", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=400, print_blob=True)
settings.load_profile("suite")

REPORTS = Path(__file__).parents[1] / "reports"
ROWS = pytest.StashKey[list[fault_report.Row]]()


def pytest_addoption(parser):
    parser.addoption(
        "--write-reports", action="store_true", help="write reports/faults.md from the fault tests"
    )


def pytest_configure(config):
    config.stash[ROWS] = []
    _heed_interrupts()


def _heed_interrupts() -> None:
    """A shell ignores SIGINT and SIGQUIT in what it starts in the background, and children inherit that: searches
    would never see the Ctrl-C that tests send them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


@pytest.fixture
def fault_row(request):
    """``fault_row(area, fault, seen, after)``: one row of the table, told once the test has checked it."""

    def add(area: str, fault: str, seen: str, after: str) -> None:
        request.config.stash[ROWS].append(fault_report.Row(area, fault, seen, after))

    return add


def pytest_sessionfinish(session):
    if session.config.getoption("--write-reports"):
        fault_report.write(REPORTS, session.config.stash[ROWS])
