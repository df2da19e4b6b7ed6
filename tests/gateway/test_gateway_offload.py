"""Threads for tokenizing: bounded, and what is cancelled in the queue is not done."""

from __future__ import annotations

import asyncio
import threading

import pytest

from services.conductor.gateway.offload import SHORT, Offload
from shared.errors import Contended
from tests.gateway.fakes import StartApi, until
from tests.held import held_now


async def test_a_result_and_an_exception_come_back() -> None:
    offload = Offload(1, 4, 100)
    assert await offload.run(10, lambda: threading.current_thread().name.startswith("tokenize")) is True
    with pytest.raises(ZeroDivisionError):
        await offload.run(10, lambda: 1 // 0)
    assert held_now()["tokenize_jobs"] == 0
    offload.close()


async def test_more_than_the_queue_takes_is_refused_with_a_time() -> None:
    offload, gate = Offload(1, 3, 100), threading.Event()
    waiting = [asyncio.create_task(offload.run(20, gate.wait)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Contended) as error:
        await offload.run(1, gate.wait)
    assert error.value.retry_after_ms > 0
    waiting[2].cancel()
    await until(lambda: waiting[2].done())
    with pytest.raises(Contended):
        await offload.run(61, gate.wait)
    gate.set()
    assert await asyncio.gather(*waiting[:2]) == [True, True]
    assert await offload.run(10**9, lambda: 5) == 5  # alone, even the largest is taken
    offload.close()


async def test_a_short_job_never_waits_for_long_ones() -> None:
    offload, gate = Offload(1, 8, 8 * SHORT), threading.Event()
    long = [asyncio.create_task(offload.run(SHORT + 1, gate.wait)) for _ in range(3)]
    await asyncio.sleep(0.01)
    async with asyncio.timeout(100):
        assert await offload.run(SHORT, lambda: 5) == 5
    assert not any(task.done() for task in long)
    gate.set()
    assert await asyncio.gather(*long) == [True] * 3
    offload.close()


async def test_a_job_that_is_cancelled_in_the_queue_never_runs() -> None:
    offload, gate, ran = Offload(1, 8, 100), threading.Event(), threading.Event()
    first = asyncio.create_task(offload.run(1, gate.wait))
    second = asyncio.create_task(offload.run(1, ran.set))
    await asyncio.sleep(0.01)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    gate.set()
    await first
    await offload.run(1, lambda: None)
    assert not ran.is_set()
    offload.close()


async def test_a_full_backlog_is_429_and_passes(start: StartApi) -> None:
    offload, gate = Offload(1, 1, 2**20), threading.Event()
    api = await start(offload=offload)
    blocker = asyncio.create_task(offload.run(5, gate.wait))
    await asyncio.sleep(0)
    status, answer, headers = await api.chat()
    assert (status, answer["error"]["code"]) == (429, "contended")
    assert int(headers["Retry-After"]) >= 1
    gate.set()
    await blocker
    assert (await api.chat())[0] == 200
