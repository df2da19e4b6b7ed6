"""A store agent as a process."""

from __future__ import annotations

import asyncio
import sys

from services.store.agent import run_agent
from services.store.settings import StoreSettings
from shared.config import load
from shared.early_signals import STOPPING
from shared.ending import leave, until_told
from shared.errors import ConfigError, MooncakeError
from shared.metrics_server import DRAINING, MetricsServer
from shared.telemetry import log, setup

logger = log("store")

SWITCH_INTERVAL = 0.0005
"""Seconds that a transfer thread waits for the GIL at most, while the loop runs Python."""


class AgentProcess:
    """Runs the agent until SIGTERM or SIGINT. Raises MooncakeError when it cannot start or may not go on."""

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._told = asyncio.Event()
        self._up = False

    async def run(self) -> None:
        for number in STOPPING:
            asyncio.get_running_loop().add_signal_handler(number, self._told.set)
        await until_told(asyncio.create_task(self._serve()), self._told, lambda: self._up)

    async def _serve(self) -> None:
        settings = self._settings
        async with (
            MetricsServer(settings.metrics_host, settings.metrics_port) as metrics,
            run_agent(settings, metrics=metrics.address(settings.redis)) as agent,
        ):
            agent.refused.add_done_callback(lambda _: self._told.set())
            metrics.hindrances = lambda: [DRAINING] if self._told.is_set() else []
            self._up = True
            await self._told.wait()
            if agent.refused.done():
                raise agent.refused.result()


async def serve(settings: StoreSettings) -> int:
    """The exit code."""
    try:
        await AgentProcess(settings).run()
    except MooncakeError as e:
        logger.error("store agent ends", error=e.message)
        return 2 if isinstance(e, ConfigError) else 1  # 2: to start it again does not help
    return 0


def main() -> None:
    settings = load(StoreSettings, prog="store")
    setup("store", settings)
    sys.setswitchinterval(SWITCH_INTERVAL)

    async def run() -> None:
        leave(await serve(settings))

    asyncio.run(run())
