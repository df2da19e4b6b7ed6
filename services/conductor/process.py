"""A conductor as a process."""

from __future__ import annotations

import asyncio

from services.conductor.service import Stopping, run
from services.conductor.settings import ConductorSettings
from shared.config import load
from shared.early_signals import STOPPING
from shared.ending import leave
from shared.errors import ConfigError
from shared.telemetry import log, setup


async def serve(settings: ConductorSettings) -> int:
    """The exit code."""
    stopping = Stopping()
    for number in STOPPING:
        asyncio.get_running_loop().add_signal_handler(number, stopping.tell)
    try:
        await run(settings, stopping)
    except ConfigError as e:
        log("conductor").error("conductor ends", error=e.message)
        return 2
    return 0


def main() -> None:
    settings = load(ConductorSettings, prog="conductor")
    setup("conductor", settings)

    async def run_and_leave() -> None:
        leave(await serve(settings))

    asyncio.run(run_and_leave())
