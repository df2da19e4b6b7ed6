"""The paper's trace format: one JSON object a line with arrival, lengths and the chained ids of the prompt's blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from shared.errors import MALFORMED, InvalidInput

BLOCK = 512
"""Tokens of a block in traces."""

LONGEST = 1 << 24
"""Most tokens of a prompt or an answer: as long as any context that an engine may be given."""


class TraceRequest(NamedTuple):
    """One request. ``arrival``: seconds since the trace began. ``hash_ids``: one for each block of ``BLOCK`` tokens of
    the prompt, the last one maybe partial; equal ids are equal tokens after equal tokens, as ids are chained."""

    arrival: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


class _Line(msgspec.Struct):
    """A line as the traces have it; other fields are passed over. ``timestamp``: ms."""

    timestamp: Annotated[float, Meta(ge=0, le=1e12)]
    input_length: Annotated[int, Meta(ge=1, le=LONGEST)]
    output_length: Annotated[int, Meta(ge=0, le=LONGEST)]
    hash_ids: tuple[Annotated[int, Meta(ge=0)], ...]


_decoder = msgspec.json.Decoder(_Line)
_encoder = msgspec.json.Encoder()


def blocks(tokens: int) -> int:
    """How many blocks hold so many tokens, the last one maybe partial."""
    return -(-tokens // BLOCK)


def read_trace(path: str | Path) -> Iterator[TraceRequest]:
    """The requests of a JSONL file, read line by line as they are asked for; empty lines are passed over.

    Raises InvalidInput with number of the line and field: for a file that cannot be read, a line that is no request,
    ids too many or too few for the prompt's length, a timestamp before that of the line above.
    """
    try:
        with open(path, "rb") as file:
            yield from parse_trace(file, str(path))
    except OSError as error:
        raise InvalidInput(f"trace {path}: {error.strerror or error}", field="trace") from None


def parse_trace(lines: Iterable[bytes], name: str = "trace") -> Iterator[TraceRequest]:
    """As :func:`read_trace`, of lines that are at hand. ``name`` is what errors call them."""
    latest = 0.0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = _request(_decoder.decode(line))
        except MALFORMED as error:
            raise InvalidInput(f"{name}, line {number}: {error}", field="trace") from None
        if request.arrival < latest:
            what = f"timestamp {1000 * request.arrival:.0f} is before the line above ({1000 * latest:.0f})"
            raise InvalidInput(f"{name}, line {number}: {what}", field="timestamp")
        latest = request.arrival
        yield request


def write_trace(path: str | Path, requests: Iterable[TraceRequest]) -> int:
    """Write a JSONL file, arrivals rounded to milliseconds; returns the number of requests. Raises OSError."""
    count = 0
    with open(path, "wb") as file:
        for count, request in enumerate(requests, 1):  # noqa: B007
            file.write(trace_line(request))
    return count


def trace_line(request: TraceRequest) -> bytes:
    """The request as a line, its end included."""
    ms = round(request.arrival * 1000)
    return _encoder.encode(_Line(ms, request.input_tokens, request.output_tokens, request.hash_ids)) + b"\n"


def _request(line: _Line) -> TraceRequest:
    needed = blocks(line.input_length)
    if len(line.hash_ids) != needed:
        what = f"{len(line.hash_ids)} ids, {line.input_length} tokens make {needed} blocks of {BLOCK}"
        raise msgspec.ValidationError(f"{what} - at `$.hash_ids`")
    return TraceRequest(line.timestamp / 1000, line.input_length, line.output_length, line.hash_ids)
