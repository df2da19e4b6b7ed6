"""``python -m services.store``: the store agent of this node, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys

from services.store.agent import run_agent
from services.store.settings import StoreSettings
from shared.config import load
from shared.errors import ConfigError, MooncakeError
from shared.metrics_server import MetricsServer
from shared.telemetry import log, setup

logger = log("store")

SWITCH_INTERVAL = 0.0005
"""Seconds that a transfer thread waits for the GIL at most, while the loop runs Python."""


async def serve(settings: StoreSettings) -> None:
    """Runs until told to stop. Raises MooncakeError when it cannot start or may not go on."""
    stopping = asyncio.Event()
    for sign in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(sign, stopping.set)
    async with contextlib.AsyncExitStack() as stack:
        metrics = MetricsServer(settings.metrics_host, settings.metrics_port)
        await stack.enter_async_context(metrics)
        agent = await stack.enter_async_context(run_agent(settings, metrics=metrics.address(settings.redis)))
        agent.refused.add_done_callback(lambda _: stopping.set())
        await stopping.wait()
        if agent.refused.done():
            raise agent.refused.result()


def main() -> int:
    settings = load(StoreSettings, prog="store")
    setup("store", settings)
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        asyncio.run(serve(settings))
    except MooncakeError as e:
        logger.error("store agent ends", error=e.message)
        return 2 if isinstance(e, ConfigError) else 1  # 2: to start it again does not help
    return 0


if __name__ == "__main__":
    sys.exit(main())
