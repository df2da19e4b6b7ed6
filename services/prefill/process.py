"""A prefill instance as a process."""

from __future__ import annotations

import asyncio

from services.prefill.service import Prefill
from services.prefill.settings import PrefillSettings
from services.store.client import StoreClient
from shared.blocks import Namespace
from shared.config import load
from shared.ending import leave
from shared.instance.host import Host, Parts
from shared.records import PREFILL
from shared.telemetry import setup


def main() -> None:
    settings = load(PrefillSettings)
    setup(PREFILL, settings)

    async def connect(namespace: Namespace) -> StoreClient:
        return await StoreClient.connect(
            settings.agent, namespace, owner_name=f"prefill {settings.node}", secret=settings.secret, timeout=1.0
        )

    def build(parts: Parts) -> Prefill:
        return Prefill(parts.ref, parts.bus, parts.store, parts.engine, parts.compute, parts.prefill_model, settings)

    async def run() -> None:
        leave(await Host(PREFILL, settings, connect, build).run())

    asyncio.run(run())
