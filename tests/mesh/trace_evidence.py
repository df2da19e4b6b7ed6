"""``python -m tests.mesh.trace_evidence > docs/evidence/traces.md``: traces as an independent receiver got them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from shared.engines.tiny import make_tiny_model
from tests.mesh.mesh import BASE, MODEL, Mesh, start_mesh
from tests.mesh.receiver import Receiver, Span

FLAGS = ("--engine", "simulated", "--prefill", "2", "--policy", "least_loaded")
SLOW = {"MOONCAKE_SIMULATED_PREFILL_BASE_S": "0", "MOONCAKE_SIMULATED_PREFILL_TOKEN_S": "0.002"}
ROOT = "POST /v1/completions"
WIDTH = 400
HEAD = """# Traces as an independent receiver got them

Written by `python -m tests.mesh.trace_evidence`. Received by rotel over OTLP from
`mooncake up {flags}`, two milliseconds a prompt token.
A line is a span: its name, the service and the kind, the status where it has one, its attributes (those of HTTP left
out) and its events. Every request had a `traceparent` of its client. Long lines are cut.
"""


def lines(spans: list[Span]) -> Iterable[str]:
    """The tree of one trace, children in the order in which they came."""
    ids = {span.id for span in spans}

    def below(parent: Span | None, depth: int) -> Iterable[str]:
        for span in spans:
            if (span.parent not in ids) if parent is None else span.parent == parent.id:
                yield ("  " * depth + described(span))[:WIDTH]
                yield from below(span, depth + 1)

    return below(None, 0)


def described(span: Span) -> str:
    words = [f"{span.name} ({span.service.removeprefix('mooncake-')}, {span.kind.removeprefix('SPAN_KIND_').lower()})"]
    if span.status == "STATUS_CODE_ERROR":
        words.append(f"[ERROR: {span.reason}]")
    words += [f"{name}={value}" for name, value in span.attributes.items() if not name.startswith(("http.", "url."))]
    return " ".join(words) + (f" events: {', '.join(span.events)}" if span.events else "")


class Asker:
    """One mesh, its receiver, and what was received of each request."""

    def __init__(self, mesh: Mesh, receiver: Receiver) -> None:
        self.mesh, self.receiver = mesh, receiver
        self._rng = random.Random(secrets.token_bytes(8))

    def prompt(self, tokens: int) -> list[int]:
        return [self._rng.randrange(10, 250) for _ in range(tokens)]

    async def post(self, prompt: list[int], seconds: float = 60.0, slo: str = "") -> str:
        """The trace of a request that is given up after ``seconds``."""
        trace = secrets.token_hex(16)
        headers = {"traceparent": f"00-{trace}-{secrets.token_hex(8)}-01"} | ({"x-slo-ttft-ms": slo} if slo else {})
        body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0}
        url = f"{self.mesh.url}/v1/completions"
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(seconds),
                self.mesh.session(headers) as http,
                http.post(url, json=body) as response,
            ):
                await response.read()
        return trace

    async def told(self, title: str, trace: str, *names: str) -> list[Span]:
        def whole(got: list[Span]) -> bool:
            return {ROOT, *names} <= {span.name for span in got}

        await asyncio.to_thread(self.receiver.wait, whole, trace)
        await asyncio.sleep(2.0)  # what other processes send of it
        spans = self.receiver.spans(trace)
        print(f"\n## {title}\n\n```text\n" + "\n".join(lines(spans)) + "\n```")
        return spans

    async def fetched(self, protocol: str) -> None:
        """The nodes take turns: the second one brings what the first one has."""
        shared, trace = self.prompt(256), ""
        for _ in range(8):
            trace = await self.post(shared + self.prompt(40))
            await asyncio.sleep(2.0)
            if any(span.name == "store.source" for span in self.receiver.spans(trace)):
                break
        await self.told(
            f"A request over OTLP {protocol}, part of whose prompt lay on the other prefill node", trace, "decode"
        )

    async def killed(self) -> None:
        asked = asyncio.create_task(self.post(self.prompt(1000)))
        while not (busy := await asyncio.to_thread(self._computing)):
            await asyncio.sleep(0.02)
        os.kill(busy[0], signal.SIGKILL)
        title = "A request whose prefill instance was killed (its own spans died with it): 200"
        await self.told(title, await asked, "decode")

    def _computing(self) -> list[int]:
        running = self.mesh.cluster()["instances"]
        return [one["pid"] for one in running if one["role"] == "prefill" and one["load"]["running"]]


@contextlib.asynccontextmanager
async def asker(folder: Path, **variables: str) -> AsyncIterator[Asker]:
    """A mesh that sends all its spans to a receiver of its own."""
    folder.mkdir()
    with Receiver(folder) as receiver:
        endpoint = receiver.grpc if "grpc" in variables.values() else receiver.http
        os.environ |= SLOW | variables | {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        flags = ["--model", str(folder.parent / MODEL), *BASE, *FLAGS]
        mesh = await asyncio.to_thread(start_mesh, flags, folder / "log")
        try:
            yield Asker(mesh, receiver)
        finally:
            mesh.child.send_signal(signal.SIGINT)
            await asyncio.to_thread(mesh.child.wait, 60)


async def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model(folder / MODEL)
        print(HEAD.format(flags=" ".join(FLAGS)), end="")
        async with asker(folder / "http") as one:
            await one.fetched("http/protobuf")
            gone = await one.post(one.prompt(2000), 1.0)
            await one.told("A request whose client went away after a second", gone, "attempt")
            refused = await one.post(one.prompt(2000), slo="1")
            await one.told("A request that could not meet its objective: 429", refused, "schedule")
            await one.killed()
        async with asker(folder / "grpc", OTEL_EXPORTER_OTLP_PROTOCOL="grpc") as one:
            await one.fetched("grpc")


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
