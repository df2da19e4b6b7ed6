"""Two agents over Soft-RoCE: what the tests in the RDMA guest share, and what shows that RDMA carried the bytes."""

from __future__ import annotations

import asyncio
import mmap
import os
import secrets
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.store.transfer.base import Generations, Op, Peer, Request, Result
from services.store.transfer.engine import Engine
from services.store.transfer.policy import TransportPolicy
from shared.errors import PeerGone
from shared.messages import Ref

MIB = 1 << 20
KIB = 1 << 10
DEVICES = Path("/sys/class/infiniband")
HERE, THERE = ("rxe0", "rxe1"), ("rxe2", "rxe3")
PATIENCE = 100.0

in_guest = pytest.mark.skipif(
    not all((DEVICES / name).exists() for name in (*HERE, *THERE)), reason="needs the RDMA guest: make test-rdma"
)


class Pool:
    """A shared-memory file, as an agent's slab is one."""

    def __init__(self, size: int) -> None:
        self.fd = os.memfd_create("pool")
        os.ftruncate(self.fd, size)
        self.view = memoryview(mmap.mmap(self.fd, size))
        self.bytes = np.frombuffer(self.view, np.uint8)

    def fill(self, seed: int) -> None:
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, len(self.bytes), np.uint8)


@dataclass
class Agent:
    engine: Engine
    pool: Pool

    @property
    def ref(self) -> Ref:
        return self.engine.ref

    async def run(self, requests: Sequence[Request], timeout: float = PATIENCE) -> list[Result]:
        return await self.engine.transfer(requests, timeout)


@dataclass
class Rig:
    peers: dict[str, Peer] = field(default_factory=dict)
    agents: list[Agent] = field(default_factory=list)

    async def resolve(self, id: str) -> Peer:
        if id not in self.peers:
            raise PeerGone(f"nobody knows {id}")
        return self.peers[id]

    async def agent(
        self,
        devices: Sequence[str],
        size: int = 4 * MIB,
        policy: str = "require:rdma",
        generations: Generations | None = None,
        **options: Any,
    ) -> Agent:
        ref = Ref(secrets.token_hex(4), secrets.randbits(63))
        engine = Engine(
            ref,
            secret=b"of the tests",
            resolve=self.resolve,
            policy=TransportPolicy.parse(policy),
            rdma_devices=devices,
            **{"connect_timeout": 10.0, **options},
        )
        agent = Agent(engine, Pool(size))
        await engine.start()
        engine.register_local_memory(agent.pool.view, name="pool", fd=agent.pool.fd, generations=generations)
        self.peers[ref.id] = engine.peer()
        self.agents.append(agent)
        return agent


@asynccontextmanager
async def rig_of() -> AsyncIterator[Rig]:
    rig = Rig()
    try:
        yield rig
    finally:
        for agent in rig.agents:
            await agent.engine.close()


def read(peer: Agent, local: int, offset: int, length: int, grant: int = 0) -> Request:
    return Request(Op.READ, "pool", local, peer.ref, "pool", offset, length, grant)


def write(peer: Agent, local: int, offset: int, length: int, grant: int = 0) -> Request:
    return Request(Op.WRITE, "pool", local, peer.ref, "pool", offset, length, grant)


def codes(results: Sequence[Result]) -> list[str]:
    """ "ok" or the error's code, for each."""
    return [result.error.code if result.error else "ok" for result in results]


def packets(device: str) -> int:
    """Packets that a device has sent and received, by its own count."""
    folder = DEVICES / device / "ports" / "1" / "hw_counters"
    return sum(int((folder / name).read_text()) for name in ("sent_pkts", "rcvd_pkts"))


def by_rdma(results: Sequence[Result], length: int) -> None:
    """The rig: these bytes were moved, and by RDMA."""
    assert not [str(result.error) for result in results if result.error]
    assert {result.transport for result in results} == {"rdma"}
    assert sum(result.moved for result in results) == length > 0


def cable(action: str, number: int) -> None:
    """``unplug`` or ``plug`` the cable of a NIC, ``down`` or ``up`` its interface."""
    subprocess.run(["rdma-nic", action, str(number)], check=True, timeout=PATIENCE)


async def pull(action: str, number: int) -> None:
    """As ``cable``, while transfers go on."""
    await asyncio.to_thread(cable, action, number)


async def until(condition: Any, timeout: float = PATIENCE) -> None:
    """Poll until ``condition()`` holds."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.02)
