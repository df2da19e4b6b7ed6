"""An instance as a process: from its settings to its exit code."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from shared.blocks import Namespace
from shared.ending import leave
from shared.engines.base import KVStore
from shared.instance.host import Host, Parts
from shared.instance.instance import Instance
from shared.instance.settings import InstanceSettings
from shared.telemetry import setup

GREETING_S = 1.0
"""For one attempt to attach to the agent; the host makes another one."""


class Attach(Protocol):
    """The store client's ``connect``. Raises as :data:`shared.instance.host.Connect` does."""

    def __call__(
        self, address: str, namespace: Namespace, *, owner_name: str, secret: str, timeout: float
    ) -> Awaitable[KVStore]: ...


def run(role: str, settings: InstanceSettings, attach: Attach, build: Callable[[Parts], Instance[Any]]) -> None:
    """Until SIGTERM or SIGINT, or until it cannot go on; leaves this process with the exit code. ``build`` makes the
    instance of its parts."""
    setup(role, settings)

    async def connect(namespace: Namespace) -> KVStore:
        name = f"{role} {settings.node}"
        return await attach(settings.agent, namespace, owner_name=name, secret=settings.secret, timeout=GREETING_S)

    async def serve() -> None:
        leave(await Host(role, settings, connect, build).run())

    asyncio.run(serve())
