"""The paper's traces: read as they are, and refused with line and field where they are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidInput
from shared.workload.trace import BLOCK, TraceRequest, blocks, parse_trace, read_trace, trace_line, write_trace

LINE = b'{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47], "type": "chat"}\n'


@st.composite
def requests(draw: st.DrawFn) -> TraceRequest:
    tokens = draw(st.integers(1, 5 * BLOCK))
    ids = draw(st.lists(st.integers(0, 1 << 40), min_size=blocks(tokens), max_size=blocks(tokens)))
    return TraceRequest(draw(st.integers(0, 10**9)) / 1000, tokens, draw(st.integers(0, 5000)), tuple(ids))


@given(st.lists(requests(), max_size=8))
def test_what_is_written_is_read_again(some: list[TraceRequest]) -> None:
    some.sort(key=lambda request: request.arrival)
    assert list(parse_trace(map(trace_line, some))) == some


def test_a_file_is_read_with_fields_that_are_not_ours(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(LINE + b"\n" + LINE)
    assert list(read_trace(path)) == [TraceRequest(27.482, 600, 52, (46, 47))] * 2
    assert write_trace(path, [TraceRequest(0.0004, 1, 0, (7,))]) == 1
    assert list(read_trace(path)) == [TraceRequest(0.0, 1, 0, (7,))]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"not json", "malformed"),
        (b"[1]", "object"),
        (b"\xff\xfe", "malformed"),
        (b'{"timestamp": 1, "input_length": 5, "output_length": 1}', "hash_ids"),
        (b'{"timestamp": -1, "input_length": 5, "output_length": 1, "hash_ids": [1]}', "$.timestamp"),
        (b'{"timestamp": "soon", "input_length": 5, "output_length": 1, "hash_ids": [1]}', "$.timestamp"),
        (b'{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": []}', "$.input_length"),
        (b'{"timestamp": 1, "input_length": 5, "output_length": 1e99, "hash_ids": [1]}', "$.output_length"),
        (b'{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [-1]}', "$.hash_ids"),
        (b'{"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1]}', "1 ids, 513 tokens make 2"),
        (b'{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [1]}', "before the line above"),
    ],
)
def test_a_bad_line_is_named_with_its_field(line: bytes, says: str) -> None:
    reading = parse_trace([LINE, b"\n", line], "mine.jsonl")
    assert next(reading).output_tokens == 52
    with pytest.raises(InvalidInput) as refused:
        next(reading)
    assert says in refused.value.message and "mine.jsonl, line 3" in refused.value.message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"gone\.jsonl"):
        next(read_trace(tmp_path / "gone.jsonl"))
    with pytest.raises(InvalidInput, match="directory"):
        next(read_trace(tmp_path))
