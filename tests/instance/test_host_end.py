"""What ends an instance's process besides a signal."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from services.prefill.settings import PrefillSettings
from shared.blocks import Namespace
from shared.engines.base import KVStore
from shared.errors import StaleIncarnation
from shared.instance.host import Host, Parts


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
