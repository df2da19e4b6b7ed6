"""Proof that KV really travels: bytes flipped behind the owner's back change the text, or are caught."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.mesh.conftest import Alone
    from tests.mesh.mesh import Mesh

pytestmark = [pytest.mark.mesh]
CORRUPT = "mooncake_store_corrupt_blocks_total"
B, BLOCKS = 32, 40

Corrupt = Callable[..., Awaitable[tuple["Mesh", list[int]]]]


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


def blocks_by_agent(mesh: Mesh) -> dict[str, int]:
    """How many blocks the index has of each agent."""
    return dict(mesh.cluster()["index"]["blocks"])


async def serving(mesh: Mesh) -> bool:
    return (await mesh.ask([11, 12, 13], max_tokens=2)).status == 200


@pytest.fixture
def corrupted(walk: Callable[..., Mesh], tokens: Callable[[int], list[int]]) -> Corrupt:
    """A mesh whose owners' blocks of one prompt are corrupt, on the only node that holds them."""

    async def make(transport: str, verify: str) -> tuple[Mesh, list[int]]:
        mesh = walk(transport, verify)
        prompt = tokens(BLOCKS * B + 3)
        owner = await asked_of(mesh, prompt)
        await restarted(mesh, "node-d0")  # decode's own copies are gone: the only owner left is a prefill node
        await mesh.indexed(BLOCKS)
        slot = await mesh.slot_bytes()
        flipped = [flip(mesh.pid("services.store", node), slot) for node in ("node-p0", "node-p1")]
        assert sum(flipped) >= BLOCKS, flipped
        while await asked_of(mesh, [14, 15, 16]) != owner:
            pass  # the nodes take turns: the next request goes to the one that has to fetch
        return mesh, prompt

    return make


async def test_verify_off_over_tcp_a_flipped_byte_changes_the_text(corrupted: Corrupt, alone: Alone) -> None:
    mesh, prompt = await corrupted("tcp", "off")
    before = mesh.total("mooncake_store_transfer_bytes_total", transport="tcp", direction="in")
    answer = await mesh.ask(prompt)
    assert answer.cached == BLOCKS * B, "the other prefill node must have fetched the prefix"
    assert mesh.total("mooncake_store_transfer_bytes_total", transport="tcp", direction="in") > before
    assert answer.text != alone(prompt)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_verify_always_corrupt_blocks_are_recomputed_counted_and_dropped(
    corrupted: Corrupt, alone: Alone, transport: str
) -> None:
    mesh, prompt = await corrupted(transport, "always")
    before, indexed = mesh.total(CORRUPT, where="owned"), blocks_by_agent(mesh)
    answer = await mesh.ask(prompt)
    assert answer.text == alone(prompt)
    corrupt = mesh.total(CORRUPT, where="owned") - before
    assert corrupt == BLOCKS

    def lost() -> list[int]:
        after = blocks_by_agent(mesh)
        return [held - after.get(agent, 0) for agent, held in indexed.items() if held > after.get(agent, 0)]

    async with asyncio.timeout(60):  # the owner tells Redis, which tells the conductor
        while sum(lost()) < corrupt:
            await asyncio.sleep(0.05)
    assert lost() == [corrupt], "the owner's corrupt blocks, and nobody else's, are gone from the index"
    third = await mesh.ask(prompt)
    assert third.text == alone(prompt)
