"""When waiting for answers is left out, and for how long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.store.transfer.patience import MOST, Patience


def until_willing(patience: Patience) -> int:
    """How many frames are not waited for."""
    for count in range(2 * MOST):
        if patience.willing():
            return count
    raise AssertionError("never again")


def test_each_wait_in_vain_doubles_how_many_are_left_out() -> None:
    patience = Patience()
    assert until_willing(patience) == 0
    left_out = []
    for _ in range(13):
        patience.waited(in_vain=True)
        left_out.append(until_willing(patience))
    assert left_out == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024, 1024]
    patience.waited(in_vain=False)
    assert until_willing(patience) == 0
    patience.waited(in_vain=True)
    assert until_willing(patience) == 1


@given(st.lists(st.booleans(), max_size=200))
def test_waits_in_vain_are_rare_whatever_comes(outcomes: list[bool]) -> None:
    """The longest run of them costs a wait for as many frames as it is long, twice over, or ends soon after."""
    patience, frames, run = Patience(), 0, 0
    for in_vain in outcomes:
        frames += until_willing(patience) + 1
        patience.waited(in_vain)
        run = run + 1 if in_vain else 0
        assert frames >= min(2 ** max(0, run - 1), MOST)
