"""The gateway's listening socket, and how it goes away without breaking what it serves."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from aiohttp import web

from services.conductor.gateway.gateway import Gateway
from services.conductor.gateway.http import Deadlines, Server
from shared.errors import ConfigError
from shared.telemetry import log

logger = log("gateway")

BACKLOG = 4096  # connections that wait to be accepted: a burst of clients is answered, not reset


@dataclass(frozen=True)
class Listen:
    host: str
    port: int
    deadlines: Deadlines
    reuse_port: bool = False


class GatewayServer:
    """Async context manager around the socket; ``port`` is the one that listens."""

    def __init__(self, gateway: Gateway, listen: Listen) -> None:
        self._gateway = gateway
        self._listen = listen
        self._runner: web.ServerRunner | None = None
        self.port = listen.port

    async def __aenter__(self) -> GatewayServer:
        self._runner = web.ServerRunner(Server(self._gateway.handle, self._listen.deadlines), shutdown_timeout=0.5)
        await self._runner.setup()
        try:
            shared = self._listen.reuse_port or None
            await web.TCPSite(self._runner, self._listen.host, self.port, backlog=BACKLOG, reuse_port=shared).start()
        except OSError as e:
            await self._runner.cleanup()
            where = f"{self._listen.host}:{self.port}"
            raise ConfigError(f"cannot listen on {where}: {e.strerror}", field="port") from None
        self.port = int(self._runner.addresses[0][1])
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            self._gateway.cut()
            await self._runner.cleanup()

    @property
    def url(self) -> str:
        host = f"[{self._listen.host}]" if ":" in self._listen.host else self._listen.host
        return f"http://{host}:{self.port}"

    async def drain(self, timeout: float) -> bool:
        """Refuse new work, serve what is in flight for at most ``timeout`` seconds. True when all of it was served.

        The socket listens on meanwhile: readiness must be seen to fall, and a late request gets its 503.
        """
        self._gateway.draining = True
        logger.info("draining", in_flight=self._gateway.in_flight)
        try:
            async with asyncio.timeout(timeout):
                await self._gateway.drained()
        except TimeoutError:
            logger.warning("streams cut at the end of the drain", in_flight=self._gateway.in_flight)
            return False
        return True
