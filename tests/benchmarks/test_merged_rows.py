"""Rows of a file of results outlive a later run of other cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import order, report
from benchmarks.order import Served
from benchmarks.report import Row


def test_another_run_replaces_its_own_cases_and_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    report.merge("trial", [Row("CPU time", "small", 1.0, "s").most(2.0), Row("CPU time", "large", 9.0, "s")])
    report.merge("trial", [Row("CPU time", "small", 3.0, "s").most(2.0), Row("peak memory", "small", 5.0, "MiB")])
    kept = {(one.what, one.contender): one for one in report.known("trial")}
    assert {name: one.value for name, one in kept.items()} == {
        ("CPU time", "large"): 9.0,
        ("CPU time", "small"): 3.0,
        ("peak memory", "small"): 5.0,
    }
    assert kept["CPU time", "small"].met is False and kept["CPU time", "large"].budget is None


def test_refused_ones_count_against_the_share_and_among_the_longest() -> None:
    served = [Served(100 * n, 1.0) for n in range(18)] + [Served(9000, None), Served(9000, 50.0)]
    found = {what: value for (what, _), value in order.figures(served).items()}
    assert found["refused"] == found["refused of the longest tenth"] == 1
    assert found["TTFT of the longest tenth, mean"] == 50.0
    assert found["effective (20 s, 300 ms)"] == 0.9
