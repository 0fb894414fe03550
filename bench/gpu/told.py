"""A plugin of pytest: what failed is in the log at once, so that it is there even if the run is stopped before its end."""

from __future__ import annotations

import sys

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Writes the failure below the test's line."""
    if report.failed:
        sys.stdout.write(f"\n{report.longreprtext}\n")
        sys.stdout.flush()
