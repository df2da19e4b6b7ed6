"""Agents and clients of real processes' shape, in one process: two or three agents on one in-memory directory."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from services.store.agent import Agent, run_agent
from services.store.client import StoreClient
from services.store.directory import Board, LocalDirectory
from services.store.memory import stride_of
from services.store.settings import StoreSettings
from shared.blocks import Namespace

NAMESPACE = Namespace(
    model="ab", weights="cd", tokenizer="ef", dtype="float32", layers=4, kv_heads=2, head_dim=16, block_size=16
)
SLOT = NAMESPACE.geometry.slot_bytes
STRIDE = stride_of(NAMESPACE.geometry)

StartAgent = Callable[..., Awaitable[Agent]]
Connect = Callable[..., Awaitable[StoreClient]]


@pytest.fixture(params=["tcp", "shm"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def start_agent(stack: AsyncExitStack) -> StartAgent:
    """``await start_agent(slots=16, transports="require:tcp", ...)``; all share one directory."""
    board = Board()

    async def start(slots: int = 16, **settings: Any) -> Agent:
        settings = {"growth_headroom": 0.0, "low_watermark": 0.0, "high_watermark": 0.0} | settings
        chosen = StoreSettings(
            socket="@test-" + uuid4().hex, pool_bytes=slots * STRIDE, metrics_port=-1, secret="s", **settings
        )
        return await stack.enter_async_context(run_agent(chosen, LocalDirectory(board)))

    return start


@pytest.fixture
def start_ssd(stack: AsyncExitStack, tmp_path: Path) -> StartAgent:
    """Agents with an SSD tier, all of one folder: ``await start_ssd(slots=16, on=stack, ssd_bytes=..., ...)``."""
    board = Board()

    async def start(slots: int = 16, on: AsyncExitStack = stack, **options: Any) -> Agent:
        ssd: dict[str, Any] = {"ssd_path": str(tmp_path / "ssd"), "ssd_bytes": 128 * STRIDE, "ssd_ahead": 0.5}
        ssd["ssd_flush"] = 0.0
        settings = StoreSettings(socket="@test-" + uuid4().hex, pool_bytes=slots * STRIDE, **(ssd | options))
        return await on.enter_async_context(run_agent(settings, LocalDirectory(board)))

    return start


@pytest.fixture
def connect(stack: AsyncExitStack) -> Connect:
    async def connect(agent: Agent, name: str = "test") -> StoreClient:
        client = await StoreClient.connect(agent.settings.socket, NAMESPACE, owner_name=name, secret="s")
        return await stack.enter_async_context(client)

    return connect


class Child:
    """A store client in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def hear(self) -> str:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), 100)
        assert line, "the child has died"
        return line.decode().strip()

    def say(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command.encode() + b"\n")

    async def tell(self, command: str) -> list[str]:
        """What it printed before it was done."""
        self.say(command)
        lines: list[str] = []
        while (line := await self.hear()) != "done":
            lines.append(line)
        return lines

    def signal(self, sign: int) -> None:
        self._process.send_signal(sign)

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def reap(self) -> None:
        self.kill()
        await self._process.wait()


@pytest.fixture
def spawn_engine(stack: AsyncExitStack) -> Callable[[Agent], Awaitable[Child]]:
    async def spawn(agent: Agent) -> Child:
        script = Path(__file__).with_name("engine_process.py")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(script),
            agent.settings.socket,
            msgspec.json.encode(NAMESPACE).decode(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        child = Child(process)
        stack.push_async_callback(child.reap)
        assert await child.hear() == "ready"
        return child

    return spawn


@pytest.fixture
def view() -> Callable[[StoreClient], npt.NDArray[np.uint8]]:
    """The pool as [slot, byte], writable."""

    def map_pool(client: StoreClient) -> npt.NDArray[np.uint8]:
        pool = client.pool
        return np.memmap(pool.path, np.uint8, "r+", pool.offset, (pool.slots, pool.stride))

    return map_pool


@pytest.fixture
def key() -> Callable[[object], bytes]:
    """A key for any name."""
    import hashlib

    return lambda name: hashlib.sha256(repr(name).encode()).digest()[:16]


@pytest.fixture
def block() -> Callable[[], bytes]:
    return lambda: os.urandom(SLOT)
