"""Stop strings: what is found does not depend on the cut, and nothing of a stop string leaks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.conductor.gateway.stops import StopStrings, failure_table

LETTERS = st.text(alphabet="ab", min_size=1, max_size=5)


def cut_by_hand(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition: the first end of any stop string; of those that end there the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - len(max(found, key=len))], True
    return text, False


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool, list[str]]:
    """Text, whether it was stopped, and the text given out after each piece."""
    machine, out, seen = StopStrings(stops), "", []
    for piece in pieces:
        text, stopped = machine.feed(piece)
        out += text
        seen.append(out)
        if stopped:
            return out, True, seen
    return out + machine.flush(), False, seen


@given(st.lists(st.text(alphabet="abc", max_size=6), max_size=8), st.lists(LETTERS, max_size=4))
def test_any_cut_gives_what_the_definition_says(pieces: list[str], stops: list[str]) -> None:
    text, stopped, _ = run(pieces, stops)
    assert (text, stopped) == cut_by_hand("".join(pieces), stops)


@given(st.lists(st.text(alphabet="ab", max_size=4), max_size=8), st.lists(LETTERS, min_size=1, max_size=3))
def test_nothing_that_was_given_out_is_taken_back_and_nothing_is_held_without_need(
    pieces: list[str], stops: list[str]
) -> None:
    final, _, seen = run(pieces, stops)
    for at, given_out in enumerate(seen):
        assert final.startswith(given_out)
        text = "".join(pieces[: at + 1])
        held = text[len(given_out) :]
        whole, stopped = cut_by_hand(text, stops)
        assert given_out == whole if stopped else any(stop.startswith(held) for stop in stops)


def test_no_stop_strings_hold_nothing_back() -> None:
    machine = StopStrings([])
    assert machine.feed("anything") == ("anything", False)
    assert machine.flush() == ""


@pytest.mark.parametrize(
    ("pieces", "stops", "text"),
    [
        (["aabaab", "aaab"], ["aabaaa"], "aab"),  # overlaps its own prefix
        (["hello wor", "ld"], ["world", "hello worlds"], "hello "),
        (["xSTO", "P", "y"], ["STOP"], "x"),
        (["xSTO", "y"], ["STOP"], "xSTOy"),
        (["日本", "語です"], ["語"], "日本"),
        (["abc"], ["bc", "abc"], ""),
        (["abc"], ["abc", "b"], "a"),
    ],
)
def test_examples(pieces: list[str], stops: list[str], text: str) -> None:
    assert run(pieces, stops)[0] == text


def test_the_failure_table_is_that_of_the_textbook() -> None:
    assert failure_table("abacabab") == [0, 0, 1, 0, 1, 2, 3, 2]
