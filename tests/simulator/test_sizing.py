"""The search for the smallest cluster, the commands, and the figures, on small traces."""

from __future__ import annotations

import json
import warnings
from itertools import islice
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.main import main
from shared.workload.generators import Chat, HotPrefix, chat, hot_prefix
from shared.workload.trace import TraceRequest, write_trace
from simulator.figures import capacity, stages
from simulator.figures.page import page
from simulator.report import report
from simulator.runs import run
from simulator.settings import ClusterSettings
from simulator.sizing import Objective, Sizing, Tried


@pytest.fixture(scope="module")
def trace() -> list[TraceRequest]:
    return list(islice(chat(Chat(rate=2.0)), 80))


@pytest.fixture(scope="module")
def file(trace: list[TraceRequest], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    write_trace(path, trace)
    return path


def test_the_smallest_cluster_is_enough_and_one_node_less_is_not(trace: list[TraceRequest]) -> None:
    goal = Objective(ttft=8.0, tbt=0.1, share=0.9)
    sizing = Sizing(trace, goal, ClusterSettings())
    found = sizing.smallest()
    assert found and found.effective >= goal.share
    nodes = found.prefill + found.decode - 1
    assert all(one.effective < goal.share for one in sizing.curve(nodes, found.prefill, 1))


def test_what_no_cluster_meets(trace: list[TraceRequest]) -> None:
    assert Sizing(trace, Objective(ttft=1e-4, tbt=0.1), ClusterSettings(), most=4).smallest() is None


def test_the_commands_answer_in_json(file: Path, trace: list[TraceRequest]) -> None:
    simulate = ["simulate", "--trace", str(file), "--ticks", "--json", "--prefill", "2", "--decode", "2"]
    done = CliRunner().invoke(main, [*simulate, "--policy", "paper", "--seed", "3"])
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    assert figures["completed"] == len(trace)
    named = {
        "ttft_mean_s",
        "ttft_p90_s",
        "tbt_p90_s",
        "hit_by_token",
        "prefill_mean_s",
        "moved_tokens",
        "effective",
        "rejected",
    }
    assert named <= figures.keys()
    swept = json.loads(
        CliRunner().invoke(main, [*simulate, "--sweep", "policy=random,paper", "--sweep", "prefill=2,3"]).stdout
    )
    assert [one["settings"] for one in swept] == [
        f"policy={policy} prefill={nodes}" for policy in ("random", "paper") for nodes in (2, 3)
    ]
    planned = CliRunner().invoke(
        main, ["plan", "--trace", str(file), "--slo", "ttft=8,tbt=0.1", "--share", "0.9", "--json"]
    )
    assert json.loads(planned.stdout)["nodes"] >= 2
    stats = json.loads(CliRunner().invoke(main, ["trace-stats", "--trace", str(file), "--json"]).stdout)
    assert stats["requests"] == len(trace) and stats["lru"].keys() == {"1000", "10000", "inf"}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["simulate", "--set", "foo=1"], "there is no setting `foo`"),
        (["simulate", "--set", "foo"], "KEY=VALUE"),
        (["simulate", "--policy", "best"], "global_cache"),
        (["simulate", "--coupled", "--set", "budget=0"], "budget"),
        (["plan", "--slo", "itl=3"], "ttft and tbt"),
        (["plan", "--slo", "ttft=soon"], "no number"),
        (["trace-stats", "--capacity", "0"], "not positive"),
    ],
)
def test_bad_input_is_named(file: Path, command: list[str], said: str) -> None:
    done = CliRunner().invoke(main, [*command, "--trace", str(file)])
    assert done.exit_code != 0
    assert said in done.output


def test_a_curve_is_drawn_without_a_warning(tmp_path: Path) -> None:
    """Ratios such as 4P2D look like dates to matplotlib, which says so to whoever plots."""
    pytest.importorskip("matplotlib")
    from simulator.plots import ratios

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ratios([Tried(4, 2, 0.9, 0.8, 0.7), Tried(3, 3, 0.8, 0.9, 0.7)], 0.9, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 5_000


def test_a_hot_prefix_is_computed_once() -> None:
    trace = list(islice(hot_prefix(HotPrefix(rate=80.0, prefixes=1)), 200))
    figures = report(run({"prefill": 4, "decode": 2, "policy": "global_cache"}, trace))
    assert figures["hit_by_token"] > 0.8


def test_the_page_shows_what_was_computed(trace: list[TraceRequest], tmp_path: Path) -> None:
    data = {"9": capacity.compute({"synthetic": trace}, {}), "14": stages.compute({}, {})}
    text = page([capacity.FIGURE, stages.FIGURE], data, {"synthetic": [80, 1, 1, 1, 1]})
    assert "327,680" in text and "5.86 GB/s" in text and "18.57 GB/s" in text
    pytest.importorskip("matplotlib")
    for one in (capacity.FIGURE, stages.FIGURE):
        one.draw(data[one.name], tmp_path / "figure.png")
        assert (tmp_path / "figure.png").stat().st_size > 10_000
