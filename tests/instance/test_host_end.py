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
from shared.errors import ConfigError, StaleIncarnation
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
