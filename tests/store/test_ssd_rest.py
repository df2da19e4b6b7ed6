"""How long a failing disk is left alone."""

from __future__ import annotations

from services.store.ssd.rest import FIRST, MOST, Rest


def test_nothing_rests_before_anything_failed() -> None:
    assert not Rest().over(1e9)


def test_rests_double_up_to_a_limit_and_begin_anew_when_all_is_well() -> None:
    rest, now, pauses = Rest(), 0.0, []
    for _ in range(10):
        pauses.append(rest.fail(now))
        assert not rest.over(now + pauses[-1] - 0.1)
        now += pauses[-1]
        assert rest.over(now) and not rest.over(now)  # one try a rest
    assert pauses == [min(FIRST * 2**i, MOST) for i in range(10)]
    rest.well()
    assert rest.fail(now) == FIRST
