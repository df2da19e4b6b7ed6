"""Asking again: what ends it, and what does not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.errors import DeadlineExceeded, NoResponders, NoRoom
from shared.instance.attempts import LinkClock
from shared.instance.courier import Courier
from shared.memory_bus import MemoryBus
from shared.messages import Accepted, AnyMessage, Cancel, Ref

ME, THEM = Ref("me", 1), Ref("them", 2)
QUESTION = Cancel(sender=ME, target=THEM, request="r", attempt=1)


def courier_on(net: MemoryBus) -> Courier:
    clock, bus = LinkClock(), net.join("me")
    bus.on_change(lambda up: clock.link(up, asyncio.get_running_loop().time()))
    return Courier(ME, bus, clock)


async def agree(message: AnyMessage) -> AnyMessage:
    return Accepted(sender=THEM, target=ME, request="r", attempt=1)


def test_repeats_until_answered(kit: Any) -> None:
    async def main() -> None:
        net, asked = MemoryBus(), 0

        def keep(_: str, message: Any) -> bool:
            nonlocal asked
            asked += isinstance(message, Cancel)
            return asked > 3

        net.filter = keep
        courier = courier_on(net)
        await net.join().serve("them", agree)
        assert isinstance(await courier.insist(THEM, QUESTION, 10.0), Accepted)
        assert asked == 4

    kit.run(main())


def test_a_refusal_is_raised(kit: Any) -> None:
    async def main() -> None:
        async def refuse(message: AnyMessage) -> AnyMessage:
            raise NoRoom("full")

        net = MemoryBus()
        await net.join().serve("them", refuse)
        with pytest.raises(NoRoom):
            await courier_on(net).insist(THEM, QUESTION, 10.0)

    kit.run(main())


def test_nobody_there_is_believed_after_a_second(kit: Any) -> None:
    async def main() -> None:
        began = asyncio.get_running_loop().time()
        with pytest.raises(NoResponders):
            await courier_on(MemoryBus()).insist(THEM, QUESTION, 60.0)
        assert 0.9 < asyncio.get_running_loop().time() - began < 2.0

    kit.run(main())


def test_patience_ends_but_not_while_the_bus_is_down(kit: Any) -> None:
    async def main() -> None:
        net, loop = MemoryBus(), asyncio.get_running_loop()
        courier = courier_on(net)
        await net.join("them").serve("them", agree)
        net.partition("them")
        loop.call_later(2.0, net.stop)
        loop.call_later(32.0, net.start)
        with pytest.raises(DeadlineExceeded):
            await courier.insist(THEM, QUESTION, 5.0)
        assert 34.0 < loop.time() < 45.0

    kit.run(main())


def test_posts_are_lost_while_the_bus_is_down(kit: Any) -> None:
    async def main() -> None:
        net = MemoryBus()
        courier = courier_on(net)
        net.stop()
        courier.post(THEM, QUESTION)
        await courier.settled(1.0)

    kit.run(main())
