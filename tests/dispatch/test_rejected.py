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
    error = rejected(Rejection(reason, 0.8104, ttft=1.2104, tbt=0.0625), WANTED)
    assert isinstance(error, Contended) and error.message == words
    assert (error.field, error.retry_after_ms) == (reason, 810)


def test_what_is_no_contention_is_none() -> None:
    assert isinstance(rejected(Rejection("does_not_fit"), WANTED), DoesNotFit)
    assert isinstance(rejected(Rejection("no_decode")), Unavailable)
    assert isinstance(rejected(Rejection("no_room")), Contended)
