"""Live lists against an instance that follows the rules: late, repeated, reordered and lost lists."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.conductor.dispatch.lists import LiveLists
from shared.messages import Ref
from tests.examples import examples

P, D = Ref("p", 1), Ref("d", 1)
ID = ("r", 1)


class Instance:
    """Drops what three lists in a row did not hold; counts only later ones than it was told of."""

    def __init__(self) -> None:
        self.top = 0
        self.base: int | None = None
        self.misses = 0
        self.dropped = False

    def take(self, number: int, holds: bool) -> None:
        if number <= self.top or self.base is None:
            self.top = max(self.top, number)
            return
        self.top = number
        if number > self.base:
            self.misses = 0 if holds else self.misses + 1
            self.dropped = self.dropped or self.misses >= 3


@given(st.data())
@settings(max_examples=examples(200))
def test_an_instance_never_drops_what_is_listed_and_drops_what_is_not(data: st.DataObject) -> None:
    lists, p = LiveLists(), Instance()
    sent: list[tuple[int, bool]] = []
    steps = data.draw(st.lists(st.sampled_from(["round", "send", "accept", "end", "late"]), max_size=40))
    base, ended = None, False
    for step in steps:
        if step == "round":
            number = lists.begin_round()
            sent.append((number, any(entry[:2] == ID for entry in lists.page(P)[0])))
        elif step == "send" and base is None:
            base = lists.last
            lists.add(P, ID)
        elif step == "accept" and base is not None and p.base is None:
            p.base = base
            lists.accept(P, ID)
        elif step == "end" and p.base is not None:
            lists.remove(P, ID, complete=True)
            ended = True
        elif step == "late" and sent:
            p.take(*data.draw(st.sampled_from(sent)))
        if p.dropped:
            assert ended
    if p.base is not None and ended:
        for _ in range(3):
            number = lists.begin_round()
            p.take(number, bool(lists.page(P)[0]))
        assert p.dropped


def test_an_attempt_is_listed_as_accepted_only_once_it_is() -> None:
    lists = LiveLists()
    lists.add(P, ID)
    lists.begin_round()
    assert lists.page(P) == ([("r", 1, False)], [])
    lists.accept(P, ID)
    lists.add(P, ID)  # asked again
    assert lists.page(P) == ([("r", 1, True)], []) and lists.page(D) == ([], [])
    lists.accept(D, ID)
    assert len(lists) == 1


def test_what_is_complete_is_acknowledged_until_a_list_that_said_so_was_answered() -> None:
    lists = LiveLists()
    lists.add(P, ID)
    lists.begin_round()
    lists.page(P)
    lists.remove(P, ID, complete=True)
    assert lists.answered(P, 1) == []  # that list did not say so yet
    lists.begin_round()
    assert lists.page(P) == ([], [ID])
    lists.begin_round()
    assert lists.page(P) == ([], [ID])
    lists.answered(P, 2)
    assert lists.page(P) == ([], [])


def test_what_was_left_is_not_acknowledged_and_a_gone_instance_has_no_page() -> None:
    lists = LiveLists()
    lists.add(P, ID)
    lists.remove(P, ID, complete=False)
    lists.begin_round()
    assert lists.page(P) == ([], [])
    lists.add(P, ID)
    lists.drop(P)
    assert len(lists) == 0 and lists.answered(P, 5) == []


def test_answers_tell_which_accepted_attempts_the_reports_cover() -> None:
    lists = LiveLists()
    lists.add(P, ID)
    lists.add(P, ("s", 1))
    lists.accept(P, ID)
    assert lists.answered(P, lists.begin_round()) == [ID]
