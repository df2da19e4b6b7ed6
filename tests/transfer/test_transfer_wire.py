"""Frames: what is built is parsed, however the stream is split; garbage is refused before it is believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.store.transfer import wire
from services.store.transfer.wire import HEADER, LIMITS, MAGIC, Kind, Parser, Range, SegmentRef, pack
from shared.errors import DeadlineExceeded, MooncakeError, ProtocolError, StaleGeneration

U64 = st.integers(0, 2**64 - 1)
FRAMES = st.lists(
    st.tuples(
        st.sampled_from([k for k in Kind if LIMITS[k] >= 4096]), st.integers(0, 2**32 - 1), st.binary(max_size=300)
    )
)


@given(FRAMES, st.lists(st.integers(1, 40), min_size=1))
def test_frames_survive_any_split(frames: list[tuple[Kind, int, bytes]], steps: list[int]) -> None:
    stream = b"".join(pack(*frame) for frame in frames)
    parser, heard, at, turn = Parser(), [], 0, 0
    while at < len(stream):
        step = steps[turn % len(steps)]
        heard += parser.feed(stream[at : at + step])
        at, turn = at + step, turn + 1
    assert [(header.kind, header.tag, body) for header, body in heard] == frames


@given(st.binary(min_size=HEADER.size, max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    if data.startswith(MAGIC):
        return
    with pytest.raises(ProtocolError):
        Parser().feed(data)


@given(st.binary(min_size=HEADER.size - 4, max_size=300))
def test_after_the_magic_anything_is_a_frame_or_refused(data: bytes) -> None:
    try:
        for header, body in Parser().feed(MAGIC + data):
            assert len(body) == header.length <= LIMITS[header.kind]
    except ProtocolError:
        pass


@pytest.mark.parametrize("kind", list(Kind))
def test_a_length_over_the_limit_is_refused_before_any_body(kind: Kind) -> None:
    with pytest.raises(ProtocolError) as caught:
        wire.parse_header(HEADER.pack(MAGIC, kind, 0, 0, 1, LIMITS[kind] + 1))
    assert caught.value.field == "length"
    with pytest.raises(ProtocolError):
        pack(kind, 0, bytes(LIMITS[kind] + 1))


@given(
    st.lists(st.tuples(st.text(max_size=60), U64), min_size=1, max_size=5),
    st.lists(st.tuples(U64, st.integers(0, wire.MAX_LENGTH), U64, U64), min_size=1, max_size=30),
    st.randoms(),
)
def test_ranges_round_trip(
    names: list[tuple[str, int]], numbers: list[tuple[int, int, int, int]], random: object
) -> None:
    segments = [SegmentRef(*name) for name in names]
    ranges = [
        Range(i % len(segments), offset, length, grant, (i + 1) % len(segments), at, length if length < 2**32 else 0)
        for i, (offset, length, grant, at) in enumerate(numbers)
    ]
    assert wire.parse_ranges(wire.pack_ranges(segments, ranges)) == (segments, ranges)


@given(st.binary(max_size=300))
def test_malformed_ranges_are_refused(body: bytes) -> None:
    try:
        segments, ranges = wire.parse_ranges(body)
    except ProtocolError:
        return
    assert all(r.segment < len(segments) and r.source < len(segments) and r.length <= wire.MAX_LENGTH for r in ranges)
    assert 0 < len(ranges) <= wire.MAX_RANGES


@given(st.dictionaries(st.integers(0, 1000), st.sampled_from([StaleGeneration, DeadlineExceeded]), max_size=5))
def test_errors_round_trip_as_the_same_class(kinds: dict[int, type[MooncakeError]]) -> None:
    errors = {index: kind("why", field="x") for index, kind in kinds.items()}
    back = wire.parse_errors(wire.pack_errors(errors))
    assert {i: (type(e), e.message, e.field) for i, e in back.items()} == {i: (k, "why", "x") for i, k in kinds.items()}


@given(st.binary(max_size=50))
def test_malformed_bodies_are_protocol_errors(body: bytes) -> None:
    for parse in (wire.parse_errors, wire.parse_fault, wire.parse_ids):
        try:
            parse(body)
        except ProtocolError:
            pass
