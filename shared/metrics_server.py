"""``/metrics``, ``/health``, ``/ready`` and recent spans of a process, on the loop whose health is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics import exposition as openmetrics

from shared.addresses import reachable
from shared.errors import ConfigError
from shared.telemetry import REGISTRY, watch_loop

if TYPE_CHECKING:
    from shared.recent_spans import RecentSpans

STARTING, DRAINING = "starting", "draining"
"""What keeps every kind of process from being ready, at its beginning and at its end."""

TRACE = "/spans/{trace:[0-9a-f]{32}}"


def render(accept: str = "") -> tuple[bytes, str]:
    """All metrics in the format that ``accept`` asks for, and its content type."""
    encode, content_type = choose_encoder(accept)
    if content_type.startswith("application/openmetrics-text"):
        # Our names need no escaping, but the library would turn the colon of ``vllm:`` into an underscore.
        plain = content_type.partition("; escaping=")[0]
        body: bytes = openmetrics.generate_latest(  # type: ignore[no-untyped-call]
            REGISTRY, escaping=openmetrics.ALLOWUTF8
        )
        return body, plain
    return encode(REGISTRY), content_type


async def metrics(request: web.Request) -> web.Response:
    body, content_type = render(request.headers.get("Accept", ""))
    return web.Response(body=body, headers={"Content-Type": content_type})


async def spans(request: web.Request) -> web.Response:
    """What is kept of a trace here; nothing, where nothing is."""
    own = recent_spans()
    found = own.records(request.match_info["trace"]) if own is not None else []
    return web.Response(body=msgspec.json.encode(found), content_type="application/json")


async def keep(request: web.Request) -> web.Response:
    """Send what the sampler left out of a trace."""
    own = recent_spans()
    sent = own.keep(request.match_info["trace"]) if own is not None else 0
    return web.json_response({"spans": sent})


def recent_spans() -> RecentSpans | None:
    """None also where this process records no spans: then it has not loaded what does."""
    tracing = sys.modules.get("shared.tracing")
    return tracing.recent() if tracing is not None else None


async def health(_request: web.Request) -> web.Response:
    """An answer at all means that the loop runs; it depends on nothing else."""
    return web.json_response({"status": "ok"})


class MetricsServer:
    """Owns the listening socket and the loop's lag watch. ``async with``, or :meth:`start` and :meth:`close`.

    ``/health`` answers as soon as it listens. ``hindrances`` is set by the process: what keeps it from doing its work
    now, words from a bounded set; ``/ready`` answers 503 while there are any.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self.hindrances: Callable[[], Sequence[str]] = lambda: [STARTING]
        self._runner: web.AppRunner | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """The port that listens; -1 when none was wanted. Raises ConfigError when it cannot be had."""
        self._watch = asyncio.create_task(watch_loop(), name="loop-lag")
        if self.port < 0:
            return self.port
        app = web.Application()
        app.router.add_get("/metrics", metrics)
        app.router.add_get("/health", health)
        app.router.add_get("/ready", self._answer_ready)
        app.router.add_get(TRACE, spans)
        app.router.add_post(TRACE + "/keep", keep)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self.host, self.port).start()
        except OSError as error:
            await self.close()
            raise ConfigError(
                f"cannot serve metrics on {self.host}:{self.port}: {error.strerror}", field="metrics_port"
            ) from None
        self.port = self._runner.addresses[0][1]
        return self.port

    async def _answer_ready(self, _request: web.Request) -> web.Response:
        reasons = list(self.hindrances())
        return web.json_response({"ready": not reasons, "reasons": reasons}, status=503 if reasons else 200)

    def address(self, server: str) -> str:
        """host:port as the server at that URL could reach it; "" when none was wanted. After :meth:`start`."""
        return f"{reachable(self.host, server)}:{self.port}" if self.port > 0 else ""

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        if self._runner is not None:
            await self._runner.cleanup()

    async def __aenter__(self) -> MetricsServer:
        await self.start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()
