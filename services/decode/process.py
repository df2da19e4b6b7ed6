"""A decode instance as a process."""

from __future__ import annotations

import asyncio

from services.decode.service import Decode
from services.decode.settings import DecodeSettings
from services.store.client import StoreClient
from shared.blocks import Namespace
from shared.config import load
from shared.ending import leave
from shared.instance.host import Host, Parts
from shared.records import DECODE
from shared.telemetry import setup


def main() -> None:
    settings = load(DecodeSettings)
    setup(DECODE, settings)

    async def connect(namespace: Namespace) -> StoreClient:
        return await StoreClient.connect(
            settings.agent, namespace, owner_name=f"decode {settings.node}", secret=settings.secret, timeout=1.0
        )

    def build(parts: Parts) -> Decode:
        return Decode(parts.ref, parts.bus, parts.store, parts.engine, parts.compute, settings)

    async def run() -> None:
        leave(await Host(DECODE, settings, connect, build).run())

    asyncio.run(run())
