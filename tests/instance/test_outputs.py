"""Kept outputs: from index 0 until acknowledged or expired."""

from __future__ import annotations

import pytest

from shared.errors import UnknownAttempt
from shared.instance.outputs import KEEP_S, MOST, OutputLog
from shared.messages import Output, Usage

A = ("a", 1)


def log_of(*tokens: int, first: int = 0, finish: str = "") -> OutputLog:
    log = OutputLog()
    for i, token in enumerate(tokens):
        last = i == len(tokens) - 1
        assert log.add(A, Output(first + i, token, finish if last else ""), Usage(3) if i == 0 else None)
    return log


def test_since_answers_from_any_index() -> None:
    log = log_of(7, 8, 9)
    for index in range(5):
        start, outputs, usage = log.since(A, index)
        assert (start, [o.token for o in outputs]) == (index, [7, 8, 9][index:])
        assert (usage is not None) == (index == 0)


def test_who_is_far_behind_asks_more_than_once() -> None:
    log, index = log_of(*range(MOST + 10)), 0
    for count in (MOST, 10, 0):
        start, outputs, _ = log.since(A, index)
        assert (start, len(outputs)) == (index, count)
        index += count


def test_a_resumed_attempt_starts_where_it_was_resumed() -> None:
    log = log_of(8, 9, first=5)
    assert log.since(A, 0)[0] == 5
    assert [o.index for o in log.since(A, 6)[1]] == [6]


def test_repeated_outputs_are_dropped_and_holes_are_bugs() -> None:
    log = log_of(7, 8)
    assert not log.add(A, Output(0, 7))
    with pytest.raises(ValueError, match="after 1"):
        log.add(A, Output(3, 9))


def test_nothing_comes_after_the_finish() -> None:
    log = log_of(7, 8, finish="stop")
    assert not log.add(A, Output(1, 8, "stop"))
    with pytest.raises(ValueError, match="finished: True"):
        log.add(A, Output(2, 9))


def test_kept_until_acknowledged() -> None:
    log = log_of(7, finish="length")
    log.acknowledge([A])  # not ended yet: nothing is forgotten
    log.end(A, 1.0)
    log.acknowledge([("b", 1)])
    assert log.since(A, 0)[1]
    log.acknowledge([A])
    with pytest.raises(UnknownAttempt):
        log.since(A, 0)


def test_kept_until_expired() -> None:
    log = log_of(7)
    log.expire(1e9)
    log.end(A, 10.0)
    log.end(A, 50.0)  # a repeated end changes nothing
    log.expire(10.0 + KEEP_S)
    assert len(log) == 1
    log.expire(10.1 + KEEP_S)
    assert len(log) == 0


def test_what_is_listed_is_kept_for_a_slow_reader() -> None:
    log = log_of(7, 8, 9)
    log.listed([A, ("b", 1)], 5.0)  # not ended yet: nothing to put off
    log.end(A, 10.0)
    for now in range(20, 400, 10):
        log.listed([A], float(now))
        log.expire(now + 1.0)
    assert log.since(A, 0)[1]
    log.expire(390.1 + KEEP_S)
    assert len(log) == 0


def test_as_many_as_are_asked_for() -> None:
    log = log_of(7, 8, 9)
    assert [o.index for o in log.since(A, 1, most=1)[1]] == [1]
    assert [o.index for o in log.since(A, 1, most=5)[1]] == [1, 2]
