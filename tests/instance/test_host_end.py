"""What ends an instance's process besides a signal, and what it spares the collector at its beginning."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from typing import Any

import pytest

from services.prefill.settings import PrefillSettings
from shared.blocks import Namespace
from shared.engines.base import KVStore
from shared.errors import AgentGone, ConfigError, StaleIncarnation
from shared.instance.host import Host, Parts, uncollected


async def never(_namespace: Namespace) -> KVStore:
    raise AssertionError("nothing connects here")


def nothing(_parts: Parts) -> Any:
    raise AssertionError("nothing is built here")


async def test_a_refusal_in_the_heartbeats_thread_wakes_the_loop() -> None:
    """In debug mode the loop refuses to be touched from another thread, where it might else be lost."""
    asyncio.get_running_loop().set_debug(True)
    host = Host("prefill", PrefillSettings(), never, nothing)
    waiting = asyncio.create_task(host._until_stopped([]))
    await asyncio.sleep(0.01)
    beating = threading.Thread(target=host._on_refused, args=(StaleIncarnation("another one has the id"),))
    beating.start()
    async with asyncio.timeout(100):
        await waiting
    beating.join()


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_loaded_once_is_never_looked_through_again(fails: bool) -> None:
    gc.collect()
    before = gc.get_freeze_count()
    try:
        with contextlib.suppress(ConfigError), uncollected():
            assert not gc.isenabled()
            kept = [[number] for number in range(1000)]
            if fails:
                raise ConfigError("no such model")
        assert gc.isenabled()
        assert gc.get_freeze_count() - before >= len(kept)
    finally:
        gc.unfreeze()


class Store:
    """A connection to an agent that may be gone again already."""

    pool = None

    def __init__(self) -> None:
        self.closed = 0

    async def close(self) -> None:
        self.closed += 1


async def test_a_store_whose_pool_cannot_be_mapped_is_closed_before_the_next_try() -> None:
    """Else each try would leave a connection and a descriptor of a pool."""
    stores, kinds = list[Store](), iter([OSError("gone"), AgentGone("gone"), None, ConfigError("too small")])

    async def connect(_namespace: Namespace) -> Any:
        stores.append(Store())
        return stores[-1]

    class Engine:
        namespace = Namespace(
            model="m", weights="w", tokenizer="t", dtype="float32", layers=1, kv_heads=1, head_dim=8, block_size=16
        )

        def bind(self, _pool: Any) -> None:
            if (error := next(kinds)) is not None:
                raise error

    host = Host("prefill", PrefillSettings(), connect, nothing)
    engine: Any = Engine()
    found: Any = await host._open_store(engine, 100.0)
    assert found is stores[2] and [store.closed for store in stores] == [1, 1, 0]
    with pytest.raises(ConfigError):
        await host._open_store(engine, 100.0)
    assert stores[3].closed == 1
    host._compute.close()
