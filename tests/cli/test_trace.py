"""``mooncake trace``: the picture of a request's spans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from cli.main import main
from cli.trace import in_order, waterfall
from shared.span_record import SpanRecord, Traced
from tests.cli.fake_conductor import FakeConductor, fake_conductor


@pytest.fixture
def conductor() -> Iterator[FakeConductor]:
    with fake_conductor() as server:
        yield server


def span(name: str, id: str, parent: str, start: int, end: int, **more: Any) -> SpanRecord:
    given: dict[str, Any] = {"kind": "internal", "service": "mooncake-prefill", "process": 1, "status": "unset"} | more
    return SpanRecord(trace="t" * 32, span=id, parent=parent, name=name, start=start, end=end, **given)


SPANS = [
    span("decode", "d", "a", 60_000_000, 100_000_000, service="mooncake-decode"),
    span("POST", "r", "client", 0, 100_000_000, service="mooncake-conductor"),
    span("attempt", "a", "r", 10_000_000, 100_000_000, status="error", reason="cancelled"),
    span("queue", "q", "a", 20_000_000, 20_000_000, attributes={"mooncake.tokens": 7, "http.x": "hidden"}),
]


def shown(traced: Traced) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(waterfall(traced))
    return capture.get()


def test_children_stand_below_their_parents_by_their_start() -> None:
    assert [(depth, one.name) for depth, one in in_order(SPANS)] == [
        (0, "POST"),
        (1, "attempt"),
        (2, "queue"),
        (2, "decode"),
    ]


def test_spans_whose_parent_did_not_come_are_shown_all_the_same() -> None:
    assert [one.name for _, one in in_order(SPANS[:1])] == ["decode"]


def test_the_picture_says_when_how_long_what_and_what_is_missing() -> None:
    lines = shown(Traced("r1", "t" * 32, SPANS, {"10.0.0.1:9": "Connection refused"})).splitlines()
    assert "request r1" in lines[0]
    queue = next(line for line in lines if "queue" in line)
    assert "20.0" in queue and "0.0" in queue and "tokens=7" in queue and "hidden" not in queue and "█" in queue
    assert next(line for line in lines if "attempt" in line).rstrip().endswith("cancelled")
    assert lines[-1].startswith("no answer from 10.0.0.1:9: Connection refused")
    assert "no spans" in shown(Traced("r1", "", [], {}))


def test_a_clock_that_is_off_is_put_right_and_said() -> None:
    spans = [
        span("POST", "r", "", 0, 100_000_000, kind="server", host="gateway"),
        span("prefill chunk", "p", "r", 7_000_000_000, 7_050_000_000, host="node-b"),
    ]
    lines = shown(Traced("r1", "t" * 32, spans, {})).splitlines()
    chunk = next(line for line in lines if "prefill chunk" in line)
    assert "51.0" in chunk and "50.0" in chunk, chunk
    assert lines[-1].strip() == "clock of node-b adjusted by -6949.0 ms"


def test_the_command_asks_the_conductor(conductor: FakeConductor) -> None:
    answer = msgspec.to_builtins(Traced("r1", "t" * 32, SPANS, {}))
    conductor.answers["/trace/r1"] = (200, {}, answer)
    plain = CliRunner().invoke(main, ["trace", "r1", "--url", conductor.url])
    assert plain.exit_code == 0 and "attempt" in plain.output
    as_json = CliRunner().invoke(main, ["trace", "r1", "--url", conductor.url, "--json"])
    assert msgspec.json.decode(as_json.output) == answer
    conductor.answers["/trace/r2"] = (404, {}, {"error": {"message": "No trace of request r2"}})
    unknown = CliRunner().invoke(main, ["trace", "r2", "--url", conductor.url])
    assert unknown.exit_code == 1 and "No trace of request r2" in unknown.output
