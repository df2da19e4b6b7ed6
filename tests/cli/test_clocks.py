"""The picture of a request over machines whose clocks differ: causes before effects, by the least shifts that do."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from cli.clocks import SLACK, Bound, adjusted, clock_of, least_shifts
from shared.span_record import SpanEvent, SpanRecord

MS = 1_000_000
SKEW = st.integers(-10_000 * MS, 10_000 * MS)


def span(
    id: str, parent: str, host: str, start: int, end: int, kind: str = "internal", service: str = "s"
) -> SpanRecord:
    return SpanRecord(
        trace="t",
        span=id,
        parent=parent,
        name=id,
        kind=kind,
        service=service,
        process=1,
        host=host,
        start=start,
        end=end,
        status="unset",
        events=[SpanEvent("e", start, {})],
    )


@dataclass
class Truth:
    """Spans as they were, parents first, and what each clock made of them."""

    real: list[SpanRecord]
    seen: list[SpanRecord]


@st.composite
def traces(draw: st.DrawFn, nested: bool, skewed: bool = True) -> Truth:
    """The root's clock, "0", is right. ``nested``: no child outlives its parent."""
    skews = {"0": 0} | {str(i): draw(SKEW) if skewed else 0 for i in range(1, 4)}
    real = [span("0", "client", "0", 0, 1000 * MS, kind="server")]
    for i in range(1, draw(st.integers(1, 12))):
        parent = real[draw(st.integers(0, i - 1))]
        start = draw(st.integers(parent.start, parent.end))
        end = draw(st.integers(start, parent.end if nested else parent.end + 500 * MS))
        real.append(span(str(i), parent.span, draw(st.sampled_from(sorted(skews))), start, end))
    seen = [span(s.span, s.parent, s.host, s.start + skews[s.host], s.end + skews[s.host], kind=s.kind) for s in real]
    return Truth(real, seen)


def pairs(spans: list[SpanRecord]) -> list[tuple[SpanRecord, SpanRecord]]:
    by_id = {span.span: span for span in spans}
    return [(span, by_id[span.parent]) for span in spans if span.parent in by_id]


@given(traces(nested=True))
def test_children_lie_within_their_parents_whatever_the_clocks_say(truth: Truth) -> None:
    spans, _ = adjusted(truth.seen)
    for child, parent in pairs(spans):
        assert child.start >= parent.start and child.end <= parent.end + SLACK


@given(traces(nested=False))
def test_no_child_begins_before_its_parent_even_where_some_outlive_theirs(truth: Truth) -> None:
    spans, _ = adjusted(truth.seen)
    assert all(child.start >= parent.start for child, parent in pairs(spans))


@given(traces(nested=False))
def test_spans_of_a_clock_move_together_and_keep_their_length(truth: Truth) -> None:
    spans, shifts = adjusted(truth.seen)
    assert "0" not in shifts and all(shifts.values())
    for before, after in zip(truth.seen, spans, strict=True):
        by = shifts.get(clock_of(before), 0)
        assert (after.start, after.end) == (before.start + by, before.end + by)
        assert [event.at for event in after.events] == [event.at + by for event in before.events]
        assert after.span == before.span


@given(traces(nested=False))
def test_what_is_right_already_stays(truth: Truth) -> None:
    spans, _ = adjusted(truth.seen)
    assert adjusted(spans) == (spans, {})


@given(traces(nested=True, skewed=False))
def test_clocks_that_agree_are_left_alone(truth: Truth) -> None:
    assert adjusted(truth.seen) == (truth.real, {})


def test_a_clock_that_is_ahead_and_one_that_is_behind() -> None:
    root = span("r", "", "gateway", 0, 100 * MS, kind="server")
    ahead = span("a", "r", "prefill", 5020 * MS, 5060 * MS)
    behind = span("b", "a", "store", -1000 * MS, -980 * MS)
    spans, shifts = adjusted([root, ahead, behind])
    assert shifts == {"prefill": -4959 * MS, "store": 1061 * MS}
    assert [(one.start // MS, one.end // MS) for one in spans[1:]] == [(61, 101), (61, 81)]


def test_work_that_outlives_who_asked_for_it_says_nothing_of_clocks() -> None:
    root = span("r", "", "gateway", 0, 100 * MS, kind="server")
    chunk = span("c", "r", "prefill", 2 * MS, 900 * MS)
    assert adjusted([root, chunk])[1] == {}


def test_processes_of_one_machine_share_its_clock_and_unknown_machines_have_one_for_each_process() -> None:
    root = span("r", "", "", 0, 100 * MS, kind="server", service="conductor")
    early = span("c", "r", "", -3 * MS, 50 * MS, service="prefill")
    assert adjusted([root, early])[1] == {"prefill 1": 3 * MS}
    same = [span("r", "", "one", 0, 100 * MS, kind="server"), span("c", "r", "one", -3 * MS, 50 * MS)]
    assert adjusted(same) == (same, {})


def test_without_a_span_of_the_request_the_first_counts_and_strangers_stay() -> None:
    alone = [span("a", "gone", "x", 0, 1), span("b", "gone", "y", 500, 600)]
    assert adjusted(alone) == (alone, {}) and adjusted([]) == ([], {})


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(-50, 50)), max_size=40))
def test_bounds_that_can_be_kept_together_are_kept(bounds: list[tuple[int, int, int]]) -> None:
    """Whatever the order: where some shifts satisfy all of them, those that are found do."""
    asked = [Bound(*one) for one in bounds if one[0] != one[1]]
    kept: list[Bound] = []
    for one in asked:
        found = least_shifts(5, [*kept, one])
        if found[one.one] - found[one.other] <= one.most:
            kept.append(one)
            assert all(found[b.one] - found[b.other] <= b.most for b in kept)
    assert least_shifts(5, kept)[0] == 0
