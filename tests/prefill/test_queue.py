"""Who computes next, and what the queue says of itself."""

from __future__ import annotations

import asyncio

from services.prefill.queue import PrefillQueue
from services.prefill.turns import Turns
from shared.latency import PrefillModel

MODEL = PrefillModel(0.01, 0.001, 0.0)
A, B, C = ("a", 1), ("b", 1), ("c", 1)


def queue_of() -> PrefillQueue:
    queue = PrefillQueue(MODEL)
    for key, born in ((C, 3.0), (A, 1.0), (B, 2.0)):
        queue.join(key, born, 100, 0)
    return queue


def test_oldest_ready_request_first() -> None:
    queue = queue_of()
    assert queue.advance() is None
    queue.ready(C)
    queue.ready(B)
    assert queue.advance() == B
    queue.ready(A)
    assert queue.advance() is None  # nobody is interrupted
    queue.leave(B)
    assert queue.advance() == A


def test_landing_is_asked_for_when_next() -> None:
    queue = queue_of()
    for key in (A, B, C):
        queue.ready(key)
    queue.advance()
    assert [queue.near(key) for key in (A, B, C)] == [True, True, False]


def test_predicted_time_counts_what_is_left() -> None:
    queue = queue_of()
    assert queue.queue_ms() == 3 * 110
    queue.progress(A, 60)
    assert (queue.queued_tokens, round(queue.queue_ms())) == (240, 270)
    queue.leave(B)
    queue.leave(B)
    assert (len(queue), round(queue.queue_ms())) == (2, 160)


async def test_turns_come_in_order_and_survive_cancellation() -> None:
    turns, order = Turns(queue_of()), list[str]()

    async def work(key: tuple[str, int]) -> None:
        await turns.near(key)
        await turns.turn(key)
        order.append(key[0])
        await asyncio.sleep(0)
        turns.leave(key)

    tasks = [asyncio.ensure_future(work(key)) for key in (A, B, C)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    turns.leave(B)
    async with asyncio.timeout(5):
        await asyncio.gather(tasks[0], tasks[2])
    assert order == ["a", "c"]
    assert len(turns.queue) == 0
