"""``mooncake simulate``, ``plan`` and ``trace-stats``: what scripts read, and that bad input is told before any run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.plan_cluster import plan
from cli.simulate import simulate
from cli.trace_stats import trace_stats_command

LINE = '{"timestamp": %d, "input_length": 600, "output_length": 3, "hash_ids": [1, %d]}\n'


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(LINE % (1000 * n, 2 + n % 2) for n in range(6)))
    return str(path)


def test_scripts_find_what_they_read(trace: str) -> None:
    found = json.loads(
        CliRunner().invoke(trace_stats_command, ["--trace", trace, "--capacity", "1,inf", "--json"]).output
    )
    assert found["requests"] == 6 and found["input_mean"] == 600 and found["output_mean"] == 3
    assert set(found["lru"]) == {"1", "inf"} and found["lru"]["1"] < found["lru"]["inf"]
    flags = ["--trace", trace, "--prefill", "1", "--decode", "1", "--policy", "paper", "--seed", "3", "--json"]
    report = json.loads(CliRunner().invoke(simulate, flags).output)
    times = {"ttft_mean_s", "ttft_p90_s", "tbt_p90_s", "prefill_mean_s"}
    assert times | {"hit_by_token", "moved_tokens", "effective", "rejected"} <= set(report)
    smallest = json.loads(CliRunner().invoke(plan, ["--trace", trace, "--slo", "ttft=30,tbt=0.2", "--json"]).output)
    assert smallest["nodes"] == smallest["prefill"] + smallest["decode"] == 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--set", "overtake=-1"], ("overtake", "-1", "0.0")),
        (["--set", "thrift=.nan"], ("thrift", "nan")),
        (["--set", "hardware.nic=0"], ("hardware.nic", "0")),
        (["--set", "hardware=3", "--set", "hardware.nic=1"], ("hardware", "3")),
        (["--set", "prefil=3"], ("prefil",)),
        (["--set", "overtake"], ("overtake", "KEY=VALUE")),
        (["--set", "overtake=[1"], ("overtake", "[1")),
        (["--sweep", "overtake=0,abc"], ("overtake", "abc")),
        (["--policy", "best"], ("best", "global_cache")),
        (["--config", "LIST"], ("--config", "mapping")),
        (["--config", "BROKEN"], ("--config", "line 2")),
        (["--plot", "/nowhere/x.png"], ("/nowhere",)),
        (["--plot", "x.txt"], ("x.txt", ".png")),
    ],
)
def test_bad_input_is_told_before_anything_is_run(
    trace: str, tmp_path: Path, flags: list[str], said: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.simulate.one_run", None)  # a run would fail otherwise
    files = {"LIST": tmp_path / "list.yaml", "BROKEN": tmp_path / "broken.yaml"}
    files["LIST"].write_text("- 1\n")
    files["BROKEN"].write_text("a: [1, 2\n")
    done = CliRunner().invoke(simulate, ["--trace", trace, *(str(files.get(flag, flag)) for flag in flags)])
    assert isinstance(done.exception, SystemExit) and done.exit_code in (1, 2), done.output
    assert all(word in done.output for word in said), done.output


@pytest.mark.parametrize("command", [simulate, plan, trace_stats_command])
@pytest.mark.parametrize(
    ("text", "said"), [("", "no request"), (LINE.replace(", %d]", "]") % 0, "line 1"), ("{", "line 1")]
)
def test_what_is_no_trace_is_told_with_its_line(command: object, tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    done = CliRunner().invoke(command, ["--trace", str(path)])  # type: ignore[arg-type]
    assert isinstance(done.exception, SystemExit) and said in done.output
