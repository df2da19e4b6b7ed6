"""Runs flow once the landing is granted, without what decode has, and again when a path failed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from services.prefill.groups import whole_run
from services.prefill.streamer import TRIES, Streamer
from shared.engines.base import LandingTarget, Owner, Run
from shared.engines.memory_engine import MemoryEngine
from shared.engines.memory_store import MemoryNetwork, MemoryNode, MemoryStore
from shared.errors import DeadlineExceeded, Fenced, PeerGone, TransferError
from shared.messages import Ref

GEOMETRY = MemoryEngine().geometry
TARGET = LandingTarget(Ref("d", 1), 5, [0] * 9)


class Recorder(MemoryStore):
    """Remembers what was streamed; raises ``failures`` first."""

    def __init__(self, *failures: Exception) -> None:
        super().__init__(MemoryNode(MemoryNetwork(), "n", GEOMETRY, 4))
        self.failures, self.calls = list(failures), list[list[int]]()

    async def stream(self, target: LandingTarget, runs: Sequence[Run], owner: Owner, timeout: float) -> int:
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop(0)
        self.calls.append([run.block for run in runs])
        return 1


def runs(*blocks: int) -> list[Run]:
    return [whole_run(block, block, 16, GEOMETRY) for block in blocks]


async def flow(store: Recorder, play: Any) -> list[int]:
    streamer = Streamer(store, Owner("r/1"), 1.0)
    task = asyncio.ensure_future(streamer.run())
    await play(streamer)
    for _ in range(20):
        await asyncio.sleep(0)
    if task.done():
        task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return [block for call in store.calls for block in call]


async def test_waits_for_the_grant_and_leaves_out_what_decode_has() -> None:
    store = Recorder()

    async def play(streamer: Streamer) -> None:
        streamer.add(runs(0, 1))
        await asyncio.sleep(0.01)
        assert store.calls == []
        streamer.grant(TARGET, frozenset({1, 3}))
        streamer.add(runs(2, 3))

    assert await flow(store, play) == [0, 2]
    assert len(store.calls) == 1  # what has gathered goes as one call


async def test_needed_blocks_go_whole_and_once() -> None:
    async def play(streamer: Streamer) -> None:
        streamer.grant(TARGET, frozenset({1}))
        streamer.need(runs(1))
        streamer.add(runs(1, 2))  # its layers, still on their way from the compute thread

    assert await flow(Recorder(), play) == [1, 2]


@pytest.mark.parametrize("error", [PeerGone("gone"), TransferError("path"), DeadlineExceeded("slow")])
async def test_failed_calls_are_repeated(error: Exception) -> None:
    async def play(streamer: Streamer) -> None:
        streamer.grant(TARGET, frozenset())
        streamer.add(runs(4))

    assert await flow(Recorder(error, error), play) == [4]


@pytest.mark.parametrize("failures", [[PeerGone("gone")] * TRIES, [Fenced("over")]])
async def test_what_keeps_failing_ends_the_attempt(failures: list[Exception]) -> None:
    async def play(streamer: Streamer) -> None:
        streamer.grant(TARGET, frozenset())
        streamer.add(runs(4))

    with pytest.raises(ExceptionGroup) as caught:
        await flow(Recorder(*failures), play)
    assert caught.group_contains(type(failures[0]))
