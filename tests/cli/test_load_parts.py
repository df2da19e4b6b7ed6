"""The parts of ``mooncake load`` that need no server: streams in any pieces, figures, sources, bodies."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.load.client import reason, retry_after
from cli.load.command import fitting, notes
from cli.load.events import Events, Told, Usage
from cli.load.live import Progress
from cli.load.outcome import End, Outcome
from cli.load.report import Objective, report
from cli.load.source import WORDS, Bodies, Source, parse_vocabulary
from cli.plots import require
from shared.errors import InvalidInput
from shared.workload.tokens import Vocabulary, prompt_tokens
from shared.workload.trace import TraceRequest, write_trace

USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
TEXT: list[Any] = [
    {"choices": [{"text": "a", "finish_reason": None}], "usage": None},
    {"choices": [{"text": "", "finish_reason": None}]},
    {"choices": [{"text": "é\n", "finish_reason": None}]},
    {"choices": [{"text": "", "finish_reason": "length"}]},
    {"choices": [], "usage": USAGE},
]
CHAT: list[Any] = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
    {"choices": [{"delta": {"content": "a"}}]},
    {"choices": [{"delta": {"content": "b"}}, {"delta": {"content": "c"}}]},
    {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": USAGE},
]


def wire(events: list[Any], end: str = "\n") -> bytes:
    payloads = [json.dumps(event, ensure_ascii=False) for event in events] + ["[DONE]"]
    return "".join(f": a comment{end}data: {payload}{end}{end}" for payload in payloads).encode()


@given(st.sampled_from([TEXT, CHAT]), st.sampled_from(["\n", "\r\n"]), st.lists(st.integers(0, 600), max_size=9))
def test_a_stream_tells_the_same_in_any_pieces(events: list[Any], end: str, cuts: list[int]) -> None:
    data, reader, told = wire(events, end), Events(), list[Told]()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for begin, stop in itertools.pairwise(edges):
        told.append(reader.feed(data[begin:stop]))
    assert sum(one.tokens for one in told) == 3
    assert [one.usage for one in told if one.usage] == [Usage(9, 4, 3)]
    assert [one.done for one in told if one.done] == [True] and not any(one.error for one in told)


def test_errors_in_a_stream_are_told() -> None:
    assert Events().feed(b'data: {"error": {"message": "used up"}}\n\n').error == "used up"
    assert Events().feed(b'data: {"error": "used up"}\n\n').error == "used up"
    with pytest.raises(ValueError, match="none of OpenAI's"):
        Events().feed(b"data: <html>\n\n")
    with pytest.raises(ValueError, match="without end"):
        Events().feed(b"x" * (1 << 21))


@pytest.mark.parametrize(
    ("milliseconds", "seconds", "waits"),
    [
        ("1500", "2", 1.5),
        (None, "2", 2.0),
        (None, None, 1.0),
        (None, "Wed, 21 Oct 2015 07:28:00 GMT", 1.0),
        ("nan", "3", 3.0),
        ("-1", None, 1.0),
        (None, "1e9", 600.0),
    ],
)
def test_retry_after_is_read(milliseconds: str | None, seconds: str | None, waits: float) -> None:
    assert retry_after(milliseconds, seconds) == waits


def test_reasons_are_short() -> None:
    assert reason(b'{"error": {"message": "long", "code": "contended"}}') == "contended"
    assert reason(b'{"error": {"message": "long"}}') == "long"
    assert reason(b'{"error": "text"}') == "text"
    assert reason(b'{"detail": "no"}') == '{"detail": "no"}'
    assert reason(b"<html>" + 200 * b"x") == "<html>" + 74 * "x"


# -- figures -------------------------------------------------------------------------------------------------------


def outcome(number: int, end: End = End.OK, **more: Any) -> Outcome:
    usual: dict[str, Any] = {"tries": 1, "ended": number + 2.0} if end is not End.UNFINISHED else {}
    if end is End.OK:
        usual |= {"ttft": 0.5, "tbt": 0.05, "mean_gap": 0.02, "prompt_tokens": 100, "completion_tokens": 10}
    return Outcome(number, float(number), 100, 10, end=end, **{**usual, **more})


MIXED = [
    outcome(0, cached_tokens=40),
    outcome(1, ttft=31.0, cached_tokens=100),
    outcome(2, tbt=0.15),
    outcome(3, tbt=None),
    outcome(4, End.REJECTED, refusals=(0.01, 0.03), tries=2),
    outcome(5, tries=3, refusals=(0.02, 0.02)),
    outcome(6, End.ERROR, error="500 internal"),
    outcome(7, End.UNFINISHED),
]


def test_figures_say_what_happened() -> None:
    figures = report(MIXED, Objective(30.0, 0.1), 10.0)
    counts = {name: figures[name] for name in ("requests", "completed", "rejected", "errors", "unfinished")}
    assert counts == {"requests": 8, "completed": 5, "rejected": 1, "errors": 1, "unfinished": 1}
    assert figures["effective_requests"] == 3 and figures["effective"] == 3 / 7
    assert figures["effective_by_tbt"] == {"100ms": 3 / 7, "200ms": 4 / 7, "300ms": 4 / 7}
    assert figures["goodput_rps"] == 0.3
    assert figures["hit_by_token"] == 0.7, "of those answers that tell"
    assert (figures["answers_429"], figures["retries"], figures["retries_accepted"]) == (4, 3, 1)
    assert figures["retry_acceptance"] == 1 / 3
    assert figures["errors_by_kind"] == {"500 internal": 1}
    assert figures["ttft_p50_s"] == 0.5 and figures["tbt_mean_s"] == pytest.approx(0.075)
    assert not figures["generator_late"]
    json.dumps(figures)


def test_nothing_measured_is_nothing_said() -> None:
    figures = report([], Objective(30.0, 0.1), 0.0)
    for name in ("ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "tbt_p90_s", "effective", "goodput_rps"):
        assert figures[name] is None
    assert figures["hit_by_token"] is None and figures["requests"] == 0


def test_a_late_generator_says_so() -> None:
    figures = report([outcome(i, late=0.2) for i in range(5)], Objective(30.0, 0.1), 7.0)
    said = notes({**figures, "left_out": 3, "interrupted": True})
    assert figures["generator_late"] and len(said) == 4
    assert "was late" in said[0] and "3 requests are longer" in said[1] and "does not say" in said[3]


def test_the_live_line_counts() -> None:
    progress = Progress(Objective(30.0, 0.1))
    assert progress.line(0, 20, 0.0).startswith("0.0 s  0/20 sent")
    progress.count([outcome for outcome in MIXED if outcome.end is not End.UNFINISHED])
    text = progress.line(8, 20, 8.0)
    assert "8/20 sent  1 running  5 answered  1 refused  1 errors  43 % within" in text and "TTFT 0.5 s" in text


class Looked(list[Outcome]):
    """Counts the outcomes that are read of it."""

    read = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.read += len(found) if isinstance(at, slice) else 1
        return found

    def __iter__(self) -> Any:
        self.read += len(self)
        return super().__iter__()


@given(st.lists(st.sampled_from(MIXED[:-1]), max_size=300), st.lists(st.integers(0, 40), max_size=20))
def test_the_live_line_looks_at_each_once_and_counts_as_if_at_all(ends: list[Outcome], steps: list[int]) -> None:
    progress, whole, ended = Progress(Objective(30.0, 0.1)), Progress(Objective(30.0, 0.1)), Looked()
    for step in [*steps, len(ends)]:
        ended.extend(ends[len(ended) : len(ended) + step])
        progress.count(ended)
    whole.count(ends)
    assert progress.line(300, 300, 1.0) == whole.line(300, 300, 1.0)
    assert ended.read == len(ends) == len(ended)


# -- what is sent --------------------------------------------------------------------------------------------------


def test_a_trace_is_cut_scaled_and_shortened(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, [TraceRequest(float(i // 2), 600, 40, (0, i + 1)) for i in range(20)])
    whole = Source(trace=str(path)).load()
    assert len(whole) == 20 and len({request.arrival for request in whole}) == 20, "spread"
    assert len({request.arrival for request in Source(trace=str(path), spread=False).load()}) == 10
    assert len(Source(trace=str(path), requests=10, duration_s=2.0).load()) == 4
    write_trace(path, [TraceRequest(1800.0 + i, 600, 40, (0, i + 1)) for i in range(20)])
    assert len(Source(trace=str(path), duration_s=5.0, spread=False).load()) == 5, "a piece of a trace begins at 0"
    write_trace(path, [TraceRequest(float(i // 2), 600, 40, (0, i + 1)) for i in range(20)])
    assert Source(trace=str(path), compress=4.0, duration_s=2.0).load()[-1].arrival < 2.0
    assert len(Source(trace=str(path), rate=10.0, duration_s=1.0).load()) in range(7, 14)
    short = Source(trace=str(path), shorten=8).load()
    assert {request[1:3] for request in short} == {(75, 5)}


@pytest.mark.parametrize("kind", ["chat", "hot-prefix", "random"])
def test_generators_end_when_told(kind: str) -> None:
    assert len(Source(generator=kind).load()) == 100
    assert len(Source(generator=kind, requests=7).load()) == 7
    bounded = Source(generator=kind, rate=50.0, duration_s=2.0, seed=3).load()
    assert 40 < len(bounded) < 170 and bounded[-1].arrival < 2.0
    assert Source(generator=kind, requests=7, seed=1).load() != Source(generator=kind, requests=7, seed=2).load()


def test_parameters_change_a_generator() -> None:
    parameters = (("prefixes", "2"), ("prefix_tokens", "1024"), ("suffix.mean", "8"), ("suffix.variation", "0"))
    made = Source(generator="hot-prefix", parameters=parameters).load()
    assert {request.input_tokens for request in made} == {1032}
    assert len({request.hash_ids[0] for request in made}) == 2


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("turn", "3", "no parameter 'turn'; there are rate="),
        ("first", "3", "no parameter 'first'"),
        ("turns.mean", "3", "no parameter"),
        ("first.median", "3", "no parameter 'first.median'; there are mean="),
        ("turns", "many", "turns=many"),
        ("first.mean", "-3", "first.mean=-3"),
        ("rate", "0", "rate=0: rate must be positive"),
    ],
)
def test_a_wrong_parameter_is_named(name: str, value: str, says: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Source(generator="chat", parameters=((name, value),)).load()
    assert says in refused.value.message


REQUEST = TraceRequest(0.0, 600, 40, (7, 8))


def test_bodies_have_the_prompt_that_the_ids_make() -> None:
    body = json.loads(Bodies("m")(REQUEST))
    assert body["prompt"] == prompt_tokens(REQUEST).tolist()
    assert body["max_tokens"] == 40 and body["ignore_eos"] is True and body["stream_options"]["include_usage"]
    assert json.loads(Bodies("m", salt=1)(REQUEST))["prompt"] != body["prompt"]
    assert "ignore_eos" not in json.loads(Bodies("m", ignore_eos=False)(REQUEST))
    assert max(json.loads(Bodies("m", vocabulary=Vocabulary(3, 9))(REQUEST))["prompt"]) == 8
    text = json.loads(Bodies("m", "text")(REQUEST))["prompt"]
    assert len(text.split()) == 600 and set(text.split()) <= set(WORDS)
    chat = Bodies("m", "chat")
    assert json.loads(chat(REQUEST))["messages"] == [{"role": "user", "content": text}]
    assert chat.path == "/v1/chat/completions"
    assert json.loads(Bodies("m")(REQUEST._replace(output_tokens=0)))["max_tokens"] == 1


def test_what_does_not_fit_the_context_is_left_out() -> None:
    assert fitting([REQUEST], None) == fitting([REQUEST], 640) == [REQUEST]
    assert fitting([REQUEST], 639) == []


def test_ranges_of_tokens() -> None:
    assert parse_vocabulary("3:259") == Vocabulary(3, 259)
    for wrong in ("", "5", "9:3", "a:b", "1:99999999999", "-1:5"):
        with pytest.raises(InvalidInput, match="no range"):
            parse_vocabulary(wrong)


def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    require("")
    for wrong in ("plot.txt", str(tmp_path / "no" / "plot.png")):
        with pytest.raises(InvalidInput):
            require(wrong)
