"""The in-memory twin: the same contract, faults from a seed, virtual time."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import BusDown, DeadlineExceeded, NoResponders, NoRoom
from shared.memory_bus import Faults, MemoryBus
from shared.messages import Accepted, AnyMessage, Cancel, Ref, RefusedReply
from shared.virtual_loop import run

A, B = Ref("a", 1), Ref("b", 2)


def cancel(n: int = 1) -> Cancel:
    return Cancel(sender=A, target=B, request="r", attempt=n)


async def accept(message: AnyMessage) -> AnyMessage | None:
    assert isinstance(message, Cancel)
    return Accepted(sender=B, target=A, request=message.request, attempt=message.attempt)


def test_contract_of_the_bus() -> None:
    async def main() -> None:
        network = MemoryBus()
        a, b = network.join("a"), network.join("b")
        with pytest.raises(NoResponders):
            await a.request("b", cancel(), 1)
        await b.serve("b", accept)
        assert isinstance(await a.request("b", cancel(), 1), Accepted)

        async def full(message: AnyMessage) -> None:
            raise NoRoom("full")

        await b.serve("full", full)
        reply = await a.request("full", cancel(), 1)
        assert isinstance(reply, RefusedReply) and reply.error.code == "no_room"
        network.partition("b")
        with pytest.raises(DeadlineExceeded):
            await a.request("b", cancel(), 30)
        network.heal()
        changes: list[bool] = []
        a.on_change(changes.append)
        network.stop()
        with pytest.raises(BusDown):
            await a.send("b", cancel())
        network.start()
        assert changes == [False, True] and isinstance(await a.request("b", cancel(), 1), Accepted)
        await b.close()
        with pytest.raises(NoResponders):
            await a.request("b", cancel(), 1)

    run(main())


def outcome(seed: int) -> list[int]:
    async def main() -> list[int]:
        network = MemoryBus(seed, Faults(lose=0.2, duplicate=0.2, delay=0.5))
        a, b = network.join(), network.join()
        seen: list[int] = []

        async def handle(message: AnyMessage) -> None:
            assert isinstance(message, Cancel)
            seen.append(message.attempt)

        await b.serve("b", handle)
        for n in range(100):
            await a.send("b", cancel(n))
        await asyncio.sleep(10)
        return seen

    return run(main())


def test_faults_lose_repeat_reorder_and_repeat_from_their_seed() -> None:
    seen = outcome(1)
    assert seen == outcome(1) != outcome(2)
    assert len(set(seen)) < 100 and len(seen) > len(set(seen)) and seen != sorted(seen)


def test_a_killed_process_has_no_responder_and_its_requests_end() -> None:
    async def main() -> None:
        network = MemoryBus()
        a, b = network.join(), network.join()

        async def never(message: AnyMessage) -> None:
            await asyncio.Event().wait()

        await b.serve("b", never)
        asked = asyncio.create_task(b.request("b", cancel(), 1000))
        await asyncio.sleep(1)
        b.abort()
        with pytest.raises(BusDown):
            await asked
        with pytest.raises(NoResponders):
            await a.request("b", cancel(), 1)

    run(main())


def test_filter_loses_chosen_messages_and_a_deadlock_is_an_error() -> None:
    async def main() -> None:
        network = MemoryBus()
        a, b = network.join(), network.join()
        await b.serve("b", accept)
        network.filter = lambda id, message: isinstance(message, Cancel)
        with pytest.raises(DeadlineExceeded):
            await a.request("b", cancel(), 1)
        assert network.lost == 1

    run(main())
    with pytest.raises(RuntimeError, match="stands still"):
        run(asyncio.Event().wait())
