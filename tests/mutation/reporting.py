"""A plugin of pytest that writes down which test began and how each ended, even where the process dies."""

import json
import os
from typing import Any

WHERE = "MUTATION_REPORT"
"""The environment variable that names the file."""


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    _write({"began": nodeid})


def pytest_runtest_logreport(report: Any) -> None:
    late = report.failed and "Timeout (>" in str(report.longrepr)
    _write(
        {
            "test": report.nodeid,
            "phase": report.when,
            "outcome": report.outcome,
            "seconds": report.duration,
            "late": late,
        }
    )


def _write(line: dict[str, Any]) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # the controller hears of all
        with open(os.environ[WHERE], "a") as file:
            file.write(json.dumps(line) + "\n")
