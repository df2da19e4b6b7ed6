"""Budgets of the store's benchmark: ratios within a round, what was not run, what a row says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import report, store_tables
from benchmarks.store import too_long
from benchmarks.store_budgets import BUDGETS, KIB, MIB, SUITES, Case, Cell, budget_rows, sized, speed_rows
from benchmarks.store_rdma import row_of_work, rows_of, rows_of_cable

CASE = Case("transfers", "read", MIB)


def cell(*seconds: float, rounds: list[int] | None = None, why: str = "") -> Cell:
    turns = rounds or list(range(len(seconds)))
    return Cell(turns, list(seconds), [2 * s for s in seconds], [s / 2 for s in seconds], why)


def test_a_ratio_is_of_two_samples_of_the_same_round() -> None:
    """A machine that slows down for a round slows both: their ratio stays."""
    cells = {"tcp": cell(1.0, 10.0, 2.0), "raw socket": cell(0.95, 9.5, 1.9)}
    (held,) = budget_rows({CASE: cells})
    assert held.value == pytest.approx(0.95) and held.quartiles == pytest.approx([0.95, 0.95]) and held.n == 3
    assert held.budget == 0.9 and held.met is True


def test_rounds_that_only_one_of_them_ran_do_not_count() -> None:
    cells = {"tcp": cell(1.0, 1.0, 1.0), "raw socket": cell(0.5, rounds=[2], why="round 1: gone")}
    (held,) = budget_rows({CASE: cells})
    assert held.value == pytest.approx(0.5) and held.n == 1 and held.met is False and "gone" in held.note


def test_a_contender_that_was_not_run_leaves_the_budget_unjudged_and_says_why() -> None:
    cells = {"tcp": cell(1.0), "upstream tcp": cell(why="not run: no disk")}
    (held,) = budget_rows({CASE: cells})
    assert held.value is None and held.met is None and held.note == "not run: no disk"
    speeds = {row.contender: row for row in speed_rows({CASE: cells})}
    assert speeds["upstream tcp"].value is None and speeds["upstream tcp"].note == "not run: no disk"


def test_a_speed_is_bytes_of_the_whole_call_and_cpu_is_of_all_processes() -> None:
    case = Case("paper", "read", 128 * KIB, 8, 64)
    (found,) = speed_rows({case: {"tcp": cell(0.5, 0.25, 1.0)}})
    assert case.bytes == 64 * MIB and found.value == pytest.approx(1 / 16 / 0.5)
    assert found.cpu_s == pytest.approx(0.25) and "4.00 CPU s/GiB" in found.note and found.unit == "GiB/s"


@pytest.mark.parametrize(
    ("ours", "theirs", "case", "least"),
    [
        ("tcp", "upstream tcp", Case("transfers", "write", 16 * KIB, 256), 5.0),
        ("tcp", "upstream tcp", Case("transfers", "write", 128 * KIB), 2.0),
        ("tcp", "NIXL tcp", Case("transfers", "read", 4 * MIB), 1.0),
        ("shm", "NIXL shm", Case("transfers", "read", 4 * MIB), 1.0),
        ("shm", "memcpy", Case("transfers", "read", 4 * MIB), 0.8),
        ("tcp", "raw socket", Case("transfers", "read", MIB), 0.9),
    ],
)
def test_the_design_s_budgets(ours: str, theirs: str, case: Case, least: float) -> None:
    assert case in SUITES["transfers"]
    found = [b.least for b in BUDGETS if (b.ours, b.theirs) == (ours, theirs) and b.applies(case)]
    assert found == [least]


def test_what_has_no_budget_has_none() -> None:
    small, paper = Case("transfers", "read", 128 * KIB), SUITES["paper"][0]
    pairs = {(b.ours, b.theirs) for b in BUDGETS if b.applies(small)}
    assert ("tcp", "raw socket") not in pairs and not any(b.applies(paper) for b in BUDGETS)


def test_every_store_case_is_held_against_upstream() -> None:
    for case in SUITES["store"]:
        assert {b.least for b in BUDGETS if b.applies(case)} == {1.5}


def test_the_paper_s_shape_has_64_calls_of_at_least_128_kib_and_rising_sizes() -> None:
    cases = SUITES["paper"]
    assert all(case.tasks == 64 and case.size >= 128 * KIB and case.count >= 1 for case in cases)
    assert [case.bytes for case in cases] == sorted({case.bytes for case in cases})


@pytest.mark.parametrize(("count", "text"), [(7, "7 B"), (128 * KIB, "128 KiB"), (MIB * 3 // 2, "1.5 MiB")])
def test_sizes_read_well(count: int, text: str) -> None:
    assert sized(count) == text


def test_results_say_the_budget_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    cells = {"tcp": cell(1.0), "raw socket": cell(0.5)}
    report.save("trial", [*budget_rows({CASE: cells}), *speed_rows({CASE: cells})])
    held, *speeds = json.loads((tmp_path / "trial.json").read_text())["rows"]
    assert held["budget"] == 0.9 and held["met"] is False
    assert len(speeds) == 2 and not any("budget" in speed or "met" in speed for speed in speeds)


def test_what_is_printed_names_every_budget_and_who_was_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    cells = {"tcp": cell(1.0), "raw socket": cell(0.5), "upstream tcp": cell(why="not run: no disk")}
    store_tables.show([*budget_rows({CASE: cells}), *speed_rows({CASE: cells})])
    said = " ".join(capsys.readouterr().out.split())
    assert "0.50 0.50 - 0.50 1 MISSED" in said and "not judged not run: no disk" in said
    assert "upstream tcp: not run: no disk" in said and "read 1 MiB" in said


def test_a_contender_is_spared_what_would_take_for_ever_at_its_speed_so_far() -> None:
    small, large = Case("paper", "read", 128 * KIB, 8, 64), Case("paper", "read", 128 * KIB, 128, 64)
    table = {small: {"slow": cell(2.0), "quick": cell(0.01), "broken": cell(why="gone")}}
    table[large] = {name: cell() for name in table[small]}
    assert "a call would take about 32 s" in too_long(table, large, "slow")
    assert not too_long(table, large, "quick") and not too_long(table, large, "broken")
    assert not too_long(table, small, "slow")
    assert not too_long(table, Case("paper", "write", 128 * KIB, 128, 64), "slow")  # another operation says nothing


def test_rdma_rows_are_ratios_of_a_round_and_time_of_a_work_request() -> None:
    ours = [{"speed": 90.0, "cpu": 0.01}, {"speed": 120.0, "cpu": 0.04}]
    ratio, cpu, speed, theirs = rows_of({"size": MIB, "count": 10, "ours": ours, "perftest": [100.0, 100.0]})
    assert ratio.value == pytest.approx(1.05) and ratio.met is True and ratio.budget == 0.9
    assert cpu.value == pytest.approx(2.5) and cpu.budget is None
    assert speed.value == pytest.approx(105.0) and theirs.value == pytest.approx(100.0)
    work = row_of_work([8e-6, 9e-6, 20e-6])
    assert work.value == pytest.approx(9.0) and work.met is True and row_of_work([11e-6]).met is False


def test_what_a_pulled_cable_costs_is_told_pair_by_pair() -> None:
    case = {"op": "read", "size": 64 * MIB, "plain": [1.0, 10.0, 2.0], "pulled": [1.5, 11.0, 2.1]}
    plain, pulled, lost = rows_of_cable(case)
    assert (plain.value, pulled.value) == (2.0, 2.1)
    assert lost.value == pytest.approx(0.5) and lost.n == 3
