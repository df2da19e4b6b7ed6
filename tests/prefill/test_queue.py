"""Who computes next, and what the queue says of itself."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.prefill.queue import PrefillQueue, due_at
from services.prefill.turns import Turns
from shared.instance.attempts import Key
from shared.latency import PRIORITY_S, PrefillModel

MODEL = PrefillModel(0.01, 0.001, 0.0)
A, B, C = ("a", 1), ("b", 1), ("c", 1)


def queue_of() -> PrefillQueue:
    queue = PrefillQueue(MODEL)
    for key, born in ((C, 3.0), (A, 1.0), (B, 2.0)):
        queue.join(key, 30.0 + born, born, 100)
    return queue


def test_of_equal_objectives_the_oldest_ready_request_first() -> None:
    queue = queue_of()
    assert queue.advance() is None
    queue.ready(C)
    queue.ready(B)
    assert queue.advance() == B
    queue.ready(A)
    assert queue.advance() is None  # nobody is interrupted
    queue.leave(B)
    assert queue.advance() == A


def test_the_earliest_deadline_goes_first_and_priority_moves_it() -> None:
    queue = PrefillQueue(MODEL)
    asked = {"lax": (30_000, 0), "strict": (500, 0), "late": (-200, 0), "urgent": (30_000, 30), "patient": (500, -60)}
    for name, (deadline, priority) in asked.items():
        queue.join((name, 1), due_at(7.0, deadline, priority), 7.0, 100)
        queue.ready((name, 1))
    order = []
    while key := queue.advance():
        order.append(key[0])
        queue.leave(key)
    assert order == ["late", "urgent", "strict", "lax", "patient"]


def test_nobody_goes_before_who_holds_memory_for_its_turn() -> None:
    queue = queue_of()
    for key in (A, B):
        queue.ready(key)
    assert queue.advance() == A and queue.near(B)
    queue.commit(B)
    for number in range(3):
        queue.join((f"urgent{number}", 1), 0.0, 4.0, 1)
        queue.ready((f"urgent{number}", 1))
    queue.leave(A)
    assert queue.advance() == B
    queue.commit(B)  # it computes: nothing to keep
    queue.commit(("unknown", 1))
    queue.leave(B)
    assert queue.advance() == ("urgent0", 1)


@given(st.integers(1, 30_000), st.integers(0, 100), st.integers(1, 30_000), st.integers(-100, 100))
def test_nobody_goes_before_one_whose_deadline_has_come(objective: int, later: int, other: int, priority: int) -> None:
    due = due_at(0.0, objective, 0)
    assert due_at(due + later, other, priority) >= due


@given(
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, 20_000), st.integers(-100, 100)), min_size=1, max_size=60),
    st.integers(1, 20_000),
    st.integers(-100, 100),
)
def test_nobody_starves(others: list[tuple[float, int, int]], objective: int, priority: int) -> None:
    """However urgent those are that keep coming, only those go before it that came while they could still be due first:
    within the range of objectives and priorities."""
    queue, now, mine = PrefillQueue(MODEL), 0.0, ("mine", 1)
    due = due_at(0.0, objective, priority)
    queue.join(mine, due, 0.0, 1)
    queue.ready(mine)
    for number, (pause, deadline, urgency) in enumerate(others):
        now += pause
        key = (f"{number}", 1)
        queue.join(key, due_at(now, deadline, urgency), now, 1)
        queue.ready(key)
        turn = queue.advance()
        assert turn is not None
        if turn == mine:
            return
        queue.leave(turn)
        assert now <= due + 100 * PRIORITY_S


def test_landing_is_asked_for_when_next() -> None:
    queue = queue_of()
    for key in (A, B, C):
        queue.ready(key)
    queue.advance()
    assert [queue.near(key) for key in (A, B, C)] == [True, True, False]


def test_predicted_time_counts_what_is_left() -> None:
    queue = queue_of()
    assert queue.queue_ms() == pytest.approx(3 * 110)
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
    async with asyncio.timeout(100):
        await asyncio.gather(tasks[0], tasks[2])
    assert order == ["a", "c"]
    assert len(turns.queue) == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(["join", "ready", "progress", "leave", "advance"]), st.integers(0, 9)), max_size=60
    )
)
def test_sums_and_order_are_those_of_what_waits(steps: list[tuple[str, int]]) -> None:
    queue, waiting = PrefillQueue(PrefillModel(0.01, 0.001, 1e-6), ahead=2), dict[Key, list[int]]()
    ready = set[Key]()
    for what, number in steps:
        key = (str(number), 1)
        if what == "join" and key not in waiting:
            waiting[key] = [10 * number + 5, 0]
            queue.join(key, float(number % 3), 0.0, 10 * number + 5)
        elif what == "ready" and key in waiting:
            queue.ready(key)
            ready.add(key)
        elif what == "progress" and key in waiting:
            waiting[key][1] = min(waiting[key][0], waiting[key][1] + 3 * number)
            queue.progress(key, waiting[key][1])
        elif what == "leave":
            queue.leave(key)
            waiting.pop(key, None)
            ready.discard(key)
        elif what == "advance":
            before, order = queue.current, sorted((int(k[0]) % 3, k) for k in ready if k != queue.current)
            expected = order[0][1] if before is None and order else None
            assert queue.advance() == expected
        order = sorted((int(k[0]) % 3, k) for k in ready if k != queue.current)
        assert queue.front() == [*([queue.current] if queue.current else []), *(k for _, k in order[:2])]
        assert len(queue) == len(waiting)
        assert queue.queued_tokens == sum(n - p for n, p in waiting.values())
        seconds = sum(queue.model.seconds(n, p) for n, p in waiting.values() if p < n)
        assert queue.queue_ms() == pytest.approx(1000 * seconds)


async def test_a_thousand_that_wait_wake_one_after_the_other() -> None:
    queue = PrefillQueue(MODEL)
    turns, order = Turns(queue), list[int]()
    looks = 0
    near = queue.near

    def counted(key: Key) -> bool:
        nonlocal looks
        looks += 1
        return near(key)

    queue.near = counted  # type: ignore[method-assign]

    async def work(number: int) -> None:
        key = (f"{number:04d}", 1)
        queue.join(key, float(number), 0.0, 10)
        await turns.near(key)
        await turns.turn(key)
        order.append(number)
        await asyncio.sleep(0)
        turns.leave(key)

    async with asyncio.timeout(100):
        await asyncio.gather(*(work(number) for number in range(1000)))
    assert order == list(range(1000))
    assert looks < 5000
