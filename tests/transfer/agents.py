"""Agents for the tests: engines in this process over memfd pools, and the same in another process."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import mmap
import os
import secrets
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from services.store.transfer.base import Generations, Op, Peer, Request, Result, Status
from services.store.transfer.engine import Engine
from services.store.transfer.policy import TransportPolicy
from services.store.transfer.tls import Files, Tls
from shared.errors import PeerGone
from shared.messages import Ref

SECRET = b"of the tests"
SIZE = 8 << 20
ROOT = Path(__file__).parents[2]


class Pool:
    """A shared-memory file, as an agent's slab is one."""

    def __init__(self, size: int = SIZE) -> None:
        self.fd = os.memfd_create("pool")
        os.ftruncate(self.fd, size)
        self.map = mmap.mmap(self.fd, size)
        self.view = memoryview(self.map)
        self.bytes = np.frombuffer(self.view, np.uint8)

    def __getitem__(self, item: slice) -> bytes:
        return bytes(self.view[item])

    def __setitem__(self, item: slice, value: bytes) -> None:
        self.view[item] = value

    def fill(self, seed: int) -> None:
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, len(self.bytes), np.uint8)


@dataclass
class Agent:
    engine: Engine
    pool: Pool

    @property
    def ref(self) -> Ref:
        return self.engine.ref

    async def run(self, requests: Sequence[Request], timeout: float = 100.0) -> list[Result]:
        return await self.engine.transfer(requests, timeout)


@dataclass
class World:
    """Who is where, and what to close at the end. ``policy`` and ``tls`` are those of every agent unless said
    otherwise."""

    policy: str
    tls: Files | None = None
    peers: dict[str, Peer] = field(default_factory=dict)
    agents: list[Agent] = field(default_factory=list)
    processes: list[Remote] = field(default_factory=list)

    async def resolve(self, id: str) -> Peer:
        if id not in self.peers:
            raise PeerGone(f"nobody knows {id}")
        return self.peers[id]

    async def agent(
        self,
        name: str = "",
        policy: str = "",
        size: int = SIZE,
        share: bool = True,
        generations: Generations | None = None,
        **options: Any,
    ) -> Agent:
        """A started engine with a registered segment "pool"."""
        ref = Ref(name or secrets.token_hex(4), secrets.randbits(63))
        options = {"secret": SECRET, "connect_timeout": 30.0, "tls": self.tls and Tls(self.tls), **options}
        chosen = TransportPolicy.parse(policy or self.policy)
        agent = Agent(Engine(ref, resolve=self.resolve, policy=chosen, **options), Pool(size))
        fd = agent.pool.fd if share else -1
        agent.engine.register_local_memory(agent.pool.view, name="pool", fd=fd, generations=generations)
        await agent.engine.start()
        self.peers[ref.id] = agent.engine.peer()
        self.agents.append(agent)
        return agent

    async def remote(self, name: str = "", incarnation: int = 0, port: int = 0) -> Remote:
        """An agent in a process of its own, known to everybody here."""
        ref = Ref(name or secrets.token_hex(4), incarnation or secrets.randbits(63))
        files = self.tls and dataclasses.asdict(self.tls)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.transfer.remote_agent",
            json.dumps(
                {"id": ref.id, "incarnation": ref.incarnation, "port": port, "policy": self.policy, "tls": files}
            ),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=64 << 20,
        )
        remote = Remote(ref, process)
        self.processes.append(remote)
        told = await remote.hear()
        remote.peer = Peer(ref, told["host"], told["port"], told["host_id"], told["shm"])
        self.peers[ref.id] = remote.peer
        return remote

    async def close(self) -> None:
        for agent in self.agents:
            await agent.engine.close()
        for remote in self.processes:
            await remote.kill()


@dataclass
class Remote:
    """An agent in another process; ``ask`` makes it do something (see remote_agent)."""

    ref: Ref
    process: asyncio.subprocess.Process
    peer: Peer | None = None

    async def hear(self) -> Any:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 100)
        return json.loads(line)

    async def ask(self, do: str, **details: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **details}).encode() + b"\n")
        return await self.hear()

    async def bytes_at(self, offset: int, length: int) -> bytes:
        return bytes.fromhex(await self.ask("peek", offset=offset, length=length))

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()


@asynccontextmanager
async def world_of(policy: str, tls: Files | None = None) -> AsyncIterator[World]:
    world = World(policy, tls)
    try:
        yield world
    finally:
        await world.close()


def request(op: Op, peer: Ref, local: int, offset: int, length: int, grant: int = 0, segment: str = "pool") -> Request:
    return Request(op, "pool", local, peer, segment, offset, length, grant)


def read(peer: Ref, local: int, offset: int, length: int, grant: int = 0) -> Request:
    return request(Op.READ, peer, local, offset, length, grant)


def write(peer: Ref, local: int, offset: int, length: int, grant: int = 0) -> Request:
    return request(Op.WRITE, peer, local, offset, length, grant)


def codes(results: Sequence[Result]) -> list[str]:
    """ "ok" or the error's code, for each."""
    for result in results:
        assert (result.status is Status.FAILED) == (result.error is not None)
        assert result.status in (Status.COMPLETED, Status.FAILED)
    return [result.error.code if result.error else "ok" for result in results]


async def until(condition: Any, timeout: float = 100.0) -> None:
    """Poll until ``condition()`` holds."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.005)
