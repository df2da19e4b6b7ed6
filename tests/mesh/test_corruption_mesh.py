"""Proof that KV really travels: bytes flipped behind the owner's back change the text, or are caught."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.mesh.conftest import Alone
    from tests.mesh.mesh import Answer, Mesh

pytestmark = [pytest.mark.mesh]
CORRUPT = "mooncake_store_corrupt_blocks_total"
B, BLOCKS = 32, 40
TRIES = 5

Meet = Callable[..., Awaitable["Met"]]


def flip(pid: int, slot_bytes: int) -> int:
    """Flip a bit of the exponent of one float in every slot of an agent's pool that holds data; how many."""
    flipped = 0
    fds = Path(f"/proc/{pid}/fd").iterdir()  # the same pool is open more than once
    pools = {
        os.stat(fd).st_ino: fd for fd in fds if os.readlink(fd).startswith("/memfd:kv.") and os.access(fd, os.W_OK)
    }
    for fd in pools.values():
        size = os.stat(fd).st_size
        with open(fd, "r+b") as file, mmap.mmap(file.fileno(), size) as pool:
            for start in range(0, size - slot_bytes + 1, slot_bytes):
                slot = pool[start : start + slot_bytes]
                if any(slot[:4096]):
                    pool[start + 3 + 64] ^= 0x40  # the first layer's keys of the first token
                    flipped += 1
    return flipped


async def restarted(mesh: Mesh, node: str) -> None:
    """Kill a store agent, and wait until its successor serves its engine."""

    def incarnation() -> str:
        """Empty while there is none: a killed agent's record may be gone before its successor has registered."""
        return next((str(a["incarnation"]) for a in mesh.cluster()["agents"] if a["id"] == node), "")

    old = incarnation()
    os.kill(mesh.pid("services.store", node), signal.SIGKILL)
    while incarnation() in ("", old) or not await serving(mesh):
        await asyncio.sleep(0.1)


async def asked_of(mesh: Mesh, prompt: list[int]) -> str:
    """Ask for an answer; the prefill instance that it came from."""

    def served() -> dict[str, int]:
        return {str(i["id"]): int(i["served"]) for i in mesh.cluster()["instances"] if i["role"] == "prefill"}

    before = served()
    assert (await mesh.ask(prompt)).status == 200
    after = served()
    return next(id for id, count in after.items() if count > before.get(id, 0))


def state(mesh: Mesh, id: str) -> str:
    return next(str(one["state"]) for one in mesh.cluster()["instances"] if one["id"] == id)


def blocks_by_agent(mesh: Mesh) -> dict[str, int]:
    """How many blocks the index has of each agent."""
    return dict(mesh.cluster()["index"]["blocks"])


async def serving(mesh: Mesh) -> bool:
    return (await mesh.ask([11, 12, 13], max_tokens=2)).status == 200


@dataclass(frozen=True)
class Met:
    """A prompt whose corrupt prefix the other node took over, what it answered, and how things were before."""

    mesh: Mesh
    prompt: list[int]
    answer: Answer
    corrupt: float
    indexed: dict[str, int]


@pytest.fixture
def meet(walk: Callable[..., Mesh], tokens: Callable[[int], list[int]]) -> Meet:
    """Corrupt the owner's blocks of a prompt, on the only node that holds them, and ask for it while that node's engine
    stands still. A busy machine may well think computing cheaper than fetching, and meet nothing corrupt: then with
    another prompt."""

    async def corrupted(mesh: Mesh, prompt: list[int]) -> str:
        """The owner."""
        owner = await asked_of(mesh, prompt)
        await restarted(mesh, "node-d0")  # decode's own copies are gone: the only owner left is a prefill node
        await mesh.indexed(BLOCKS)
        slot = await mesh.slot_bytes()
        flipped = [flip(mesh.pid("services.store", node), slot) for node in ("node-p0", "node-p1")]
        assert sum(flipped) >= BLOCKS, flipped
        return owner

    async def caught(met: Met) -> bool:
        """The owner counts what the reader tells it, a moment later."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                while met.mesh.total(CORRUPT, where="owned") < met.corrupt + BLOCKS:
                    await asyncio.sleep(0.05)
                return True
        return False

    async def asked(mesh: Mesh, prompt: list[int], owner: str) -> Met:
        before = mesh.total(CORRUPT, where="owned"), blocks_by_agent(mesh)
        engine = mesh.pid("services.prefill", owner)
        os.kill(engine, signal.SIGSTOP)
        try:
            async with asyncio.timeout(100):
                while state(mesh, owner) == "alive":
                    await asyncio.sleep(0.05)
            return Met(mesh, prompt, await mesh.ask(prompt), *before)
        finally:
            os.kill(engine, signal.SIGCONT)

    async def make(transport: str) -> Met:
        mesh = walk(transport)
        for _ in range(TRIES):
            prompt = tokens(BLOCKS * B + 3)
            met = await asked(mesh, prompt, await corrupted(mesh, prompt))
            if await caught(met):
                return met
        raise AssertionError(f"in {TRIES} tries nothing was fetched")

    return make


def received(mesh: Mesh, transport: str) -> float:
    return mesh.total("mooncake_store_transfer_bytes_total", transport=transport, direction="in")


async def test_verify_off_over_tcp_a_flipped_byte_changes_the_text(
    unverified: Callable[[], Mesh], alone: Alone, tokens: Callable[[int], list[int]]
) -> None:
    """The prompt is left on a decode node alone: the prefill node takes it over from there, and hands it on."""
    mesh = unverified()
    for _ in range(TRIES):
        prompt = tokens(BLOCKS * B + 3)
        assert (await mesh.ask(prompt)).status == 200
        await restarted(mesh, "node-p0")
        await mesh.indexed(BLOCKS)
        slot = await mesh.slot_bytes()
        flipped = [flip(mesh.pid("services.store", node), slot) for node in ("node-d0", "node-d1")]
        assert sum(flipped) >= BLOCKS, flipped
        before = received(mesh, "tcp")
        answer = await mesh.ask(prompt)
        if answer.cached:  # a busy machine may think computing cheaper than fetching
            break
    else:
        raise AssertionError(f"in {TRIES} tries nothing was fetched")
    assert answer.cached == BLOCKS * B, "the prefill node must have fetched the prefix"
    assert received(mesh, "tcp") > before
    assert answer.text != await asyncio.to_thread(alone, prompt)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_verify_always_corrupt_blocks_are_recomputed_counted_and_dropped(
    meet: Meet, alone: Alone, transport: str
) -> None:
    met = await meet(transport)
    mesh = met.mesh
    assert met.answer.text == alone(met.prompt)
    corrupt = mesh.total(CORRUPT, where="owned") - met.corrupt
    assert corrupt == BLOCKS

    def lost() -> list[int]:
        after = blocks_by_agent(mesh)
        return [held - after.get(agent, 0) for agent, held in met.indexed.items() if held > after.get(agent, 0)]

    async with asyncio.timeout(60):  # the owner tells Redis, which tells the conductor
        while sum(lost()) < corrupt:
            await asyncio.sleep(0.05)
    assert lost() == [corrupt], "the owner's corrupt blocks, and nobody else's, are gone from the index"
    third = await mesh.ask(met.prompt)
    assert third.text == alone(met.prompt)
