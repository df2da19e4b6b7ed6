"""A conductor that cannot keep up refuses new work before its instances take it for dead."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.conductor.dispatch.backlog import IN_A_ROW, LATE, Backlog
from shared.errors import Contended


def refused(backlog: Backlog) -> bool:
    try:
        backlog.check()
    except Contended as error:
        assert error.field == "backlog" and error.retry_after_ms >= 1000
        return True
    return False


@given(st.lists(st.floats(0, 10)))
def test_it_refuses_while_the_last_looks_were_all_late(looks: list[float]) -> None:
    backlog = Backlog()
    assert not refused(backlog)
    for count, late in enumerate(looks, 1):
        backlog.looked(late)
        last = looks[max(0, count - IN_A_ROW) : count]
        assert refused(backlog) == (len(last) == IN_A_ROW and min(last) >= LATE)


async def test_a_loop_that_is_held_up_is_seen_and_so_is_its_end() -> None:
    backlog = Backlog()
    watch = asyncio.create_task(backlog.watch())
    try:
        async with asyncio.timeout(100):
            while not refused(backlog):
                time.sleep(0.7)  # noqa: ASYNC251 - this is the test: a loop held up as by many small callbacks
                await asyncio.sleep(0)
            with pytest.raises(Contended, match="behind"):
                backlog.check()
            while refused(backlog):
                await asyncio.sleep(0.01)
    finally:
        watch.cancel()
