"""What a stress run must not leave: held resources, blocks that the index names in vain, processes, sockets, files."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from benchmarks.stress.fleet import Fleet
from cli.warden import marked
from services.store.inspection import Verdict, inspector
from shared.errors import MooncakeError
from shared.metadata import Metadata
from shared.records import AgentRecord

PATIENCE = 60.0
"""Seconds after which what is still held counts as leaked; the budget is 14 on a machine with time to spare."""

LOOK = 0.5


async def held(fleet: Fleet) -> list[str]:
    """What agents still hold, once it does not get less any more: no client is there now."""
    deadline = time.monotonic() + PATIENCE
    while True:
        left = await _held_now(fleet)
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(LOOK)


async def _held_now(fleet: Fleet) -> list[str]:
    try:
        records = await _records(fleet)
    except MooncakeError as error:
        return [f"Redis does not answer: {error.message}"]
    missing = {agent.name for agent in fleet.agents} - {record.ref.id for record in records}
    left = [f"{name} is not registered" for name in sorted(missing)]
    for record in records:
        left += [f"{record.ref.id} holds {kind} = {amount:g}" for kind, amount in record.held.items() if amount]
    return left


async def _records(fleet: Fleet) -> list[AgentRecord]:
    async with Metadata(fleet.redis.url, fleet.mesh) as metadata:
        return await metadata.agents()


async def stored(fleet: Fleet) -> tuple[list[str], list[str]]:
    """(corrupt, lost): every indexed block is read from its owner once more."""
    corrupt: list[str] = []
    lost: list[str] = []
    async with Metadata(fleet.redis.url, fleet.mesh) as metadata, inspector(metadata, fleet.mesh, "") as eye:
        for agent in await metadata.agents():
            keys = [key async for page in eye.indexed(agent) for key, _ in page]
            async for finding in eye.verify(agent, keys, agent.slabs):
                words = f"{agent.ref.id}: {finding.key.hex()} is {finding.verdict} {finding.why}".rstrip()
                if finding.verdict is Verdict.CORRUPT:
                    corrupt.append(words)
                elif finding.verdict in (Verdict.LOST, Verdict.UNREAD):
                    lost.append(words)
    return corrupt, lost


def left_over(fleet: Fleet) -> list[str]:
    """After all processes were stopped."""
    left = [f"process {pid}" for pid in marked(fleet.mark)]
    lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    left += [f"socket {line.split()[-1]}" for line in lines if fleet.mark in line]
    return left + ([f"folder {fleet.folder}"] if fleet.folder.exists() else [])
