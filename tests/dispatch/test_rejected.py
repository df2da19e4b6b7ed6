"""A request that has no place learns what was predicted and what was allowed, and when to come again."""

from __future__ import annotations

import pytest

from services.conductor.dispatch.rejected import rejected
from services.conductor.scheduling import Objectives, Rejection
from shared.errors import Contended, DoesNotFit, Unavailable

WANTED = Objectives(ttft=0.4, tbt=0.05)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("ttft", "ttft: the first token would take 1.21 s, the objective is 0.4 s"),
        ("tbt", "tbt: the time between tokens would take 0.0625 s, the objective is 0.05 s"),
        ("no_room", "no_room: no decode instance has room for prompt and answer now"),
    ],
)
def test_contention_is_told_with_its_figures(reason: str, words: str) -> None:
    predicted, limit = {"ttft": (1.2104, 0.4), "tbt": (0.0625, 0.05)}.get(reason, (0.0, 0.0))
    error = rejected(Rejection(reason, 1.2104, 0.0625, limit), 0.8104, WANTED)
    assert isinstance(error, Contended) and error.message == words
    assert (error.field, error.retry_after_ms) == (reason, 811)
    assert (error.predicted_ms, error.limit_ms) == (round(predicted * 1000), round(limit * 1000))


def test_a_promise_to_somebody_else_is_named_as_such() -> None:
    error = rejected(Rejection("tbt", tbt=0.03, limit=0.02), 1.0, WANTED)
    assert (
        error.message
        == "tbt: the time between tokens would take 0.03 s, the objective is 0.02 s of a request beside it"
    )


def test_what_thrift_allows_is_not_called_the_objective() -> None:
    error = rejected(Rejection("ttft", ttft=0.3, limit=0.2), 0.1, WANTED)
    assert error.message == (
        "ttft: the first token would take 0.3 s, the objective is 0.4 s, "
        "of which 'admission_thrift' allows a prompt of this length 0.2 s"
    )
    assert isinstance(error, Contended) and (error.predicted_ms, error.limit_ms) == (300, 200)


def test_what_is_no_contention_is_none() -> None:
    assert isinstance(rejected(Rejection("does_not_fit"), wanted=WANTED), DoesNotFit)
    assert isinstance(rejected(Rejection("no_decode")), Unavailable)
    assert isinstance(rejected(Rejection("no_room")), Contended)
