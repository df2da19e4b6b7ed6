"""Agents whose data port speaks TLS: leases and blocks travel over it, and an agent without it is kept out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.store.agent import Agent
from services.store.client import StoreClient
from shared.engines.base import Owner, PoolClass
from shared.errors import ConfigError
from tests.transfer.certificates import authority

OWNER = Owner("request/1")

Key = Callable[[object], bytes]
Start = Callable[..., Awaitable[Agent]]
Connect = Callable[..., Awaitable[StoreClient]]


async def test_blocks_are_fetched_over_tls_and_by_nobody_else(
    start_agent: Start, connect: Connect, view: Any, key: Key, tmp_path: Path
) -> None:
    mesh = authority(tmp_path)
    agents = []
    for name in ("a", "b"):
        files = mesh.issue(name)
        tls = {"data_tls_cert": files.cert, "data_tls_key": files.key, "data_tls_ca": files.ca}
        agents.append(await start_agent(transports="require:tcp", verify="always", **tls))
    plain = await start_agent(transports="require:tcp", verify="always")
    owner, reader, outsider = [await connect(agent) for agent in (*agents, plain)]
    keys = [key(i) for i in range(4)]
    held = await owner.reserve(keys, OWNER, PoolClass.PREFILL, 100.0)
    for number, block in enumerate(held):
        view(owner)[block.slot] = number + 1
    await owner.release(await owner.commit(held, b"", keys))

    async with asyncio.timeout(100):  # an owner is asked for two seconds at most, whatever else the machine does
        fetched = await reader.fetch(keys, b"", [], OWNER, PoolClass.PREFILL, 100.0)
        while any(f.error for f in fetched):
            fetched = await reader.fetch(keys, b"", [], OWNER, PoolClass.PREFILL, 100.0)
    for number, copy in enumerate(fetched):
        assert copy.held is not None and np.all(view(reader)[copy.held.slot] == number + 1)

    refused = await outsider.fetch(keys, b"", [], OWNER, PoolClass.PREFILL, 100.0)
    assert all(f.error for f in refused)


async def test_an_agent_does_not_start_with_files_that_it_cannot_use(start_agent: Start, tmp_path: Path) -> None:
    files = authority(tmp_path).issue("a")
    with pytest.raises(ConfigError, match="cannot read") as error:
        await start_agent(data_tls_cert=files.cert, data_tls_key=str(tmp_path / "none"), data_tls_ca=files.ca)
    assert error.value.field == "data_tls_key"
