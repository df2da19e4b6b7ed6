"""The inbox: items in order, deadlines that move, one timer."""

from __future__ import annotations

import asyncio

import pytest

from shared.inbox import Inbox
from shared.virtual_loop import run


def test_items_come_in_order_and_a_waiting_reader_wakes() -> None:
    async def main() -> list[int]:
        inbox, got = Inbox[int](), list[int]()
        for item in (1, 2):
            inbox.put(item)
        asyncio.get_running_loop().call_later(5.0, inbox.put, 3)
        while len(got) < 3:
            assert await inbox.wait()
            got.append(inbox.take())
        assert len(inbox) == 0
        with pytest.raises(IndexError):
            inbox.take()
        return got

    assert run(main()) == [1, 2, 3]


@pytest.mark.parametrize("dues", [(10.0, 4.0), (4.0, 10.0), (4.0, 4.0, 30.0)])
def test_each_wait_ends_at_its_own_deadline(dues: tuple[float, ...]) -> None:
    async def main() -> None:
        inbox, loop = Inbox[int](), asyncio.get_running_loop()
        start = loop.time()
        for due in dues:
            assert not await inbox.wait(start + due)
            assert loop.time() - start == pytest.approx(max(due, *dues[: dues.index(due) + 1]), abs=0.01)

    run(main())


def test_a_deadline_that_moves_with_every_item_makes_no_timers() -> None:
    async def main() -> int:
        inbox, loop = Inbox[int](), asyncio.get_running_loop()
        made = 0
        call_at = loop.call_at

        def counted(*args: object, **more: object) -> asyncio.TimerHandle:
            nonlocal made
            made += 1
            return call_at(*args, **more)  # type: ignore[arg-type]

        def feed() -> None:
            for i in range(100):
                call_at(loop.time() + i * 0.01, inbox.put, i)

        feed()
        loop.call_at = counted  # type: ignore[method-assign]
        for _ in range(100):
            assert await inbox.wait(loop.time() + 2.0)
            inbox.take()
        assert not await inbox.wait(loop.time() + 2.0)
        return made

    assert run(main()) <= 3


def test_a_cancelled_reader_leaves_nothing() -> None:
    async def main() -> None:
        inbox = Inbox[int]()
        reader = asyncio.create_task(inbox.wait(asyncio.get_running_loop().time() + 50))
        await asyncio.sleep(1)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        inbox.put(1)
        assert await inbox.wait() and inbox.take() == 1
        inbox.close()
        assert inbox._timer is None and inbox._waiter is None

    run(main())
