"""``python -m services.conductor``: the HTTP API and the scheduler of a mesh, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import signal
import sys

from services.conductor.service import Stopping, run
from services.conductor.settings import ConductorSettings
from shared.config import load
from shared.errors import ConfigError
from shared.telemetry import log, setup

logger = log("conductor")


async def serve(settings: ConductorSettings) -> None:
    stopping = Stopping()
    for sign in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(sign, stopping.tell)
    await run(settings, stopping)


def main() -> int:
    settings = load(ConductorSettings, prog="conductor")
    setup("conductor", settings)
    try:
        asyncio.run(serve(settings))
    except ConfigError as e:
        print(f"conductor: {e.message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
