"""Time and CPU that the gateway adds: a streamed completion through it, against a bare aiohttp handler.

Both are served by one child process on two ports; the client alternates. The first token is there at once, the others
follow as from a fast engine. What tokenizing costs is a row of its own, since every gateway pays it.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from benchmarks.client import complete
from benchmarks.processes import cpu_seconds
from benchmarks.report import Row, row
from services.conductor.generation import Generation, Readiness, Token
from shared.blocks import Namespace
from shared.messages import Output, Usage

PROMPT_TOKENS, OUTPUT = 2000, 16
BETWEEN = 0.002  # seconds between tokens
EVENT = b'data: {"id":"x","object":"text_completion","choices":[{"index":0,"text":" a","finish_reason":null}]}\n\n'


class AtOnce:
    """A dispatcher without a mesh behind it."""

    context_length = 8192
    namespace = Namespace(
        model="m", weights="w", tokenizer="t", dtype="float32", layers=1, kv_heads=1, head_dim=1, block_size=32
    )

    def readiness(self) -> Readiness:
        return Readiness(True)

    def consider(
        self, prompt_bytes: int, slo_ttft_ms: int = 0, ticket: int = 0, prompt_tokens: int = 0, priority: int = 0
    ) -> None:
        return None

    def cluster(self) -> dict[str, Any]:
        return {}

    async def generate(self, generation: Generation) -> AsyncIterator[Token]:
        last = generation.sampling.max_tokens - 1
        for index in range(last + 1):
            usage = Usage() if index == 0 else None
            yield Token(Output(index, 1000 + index, "length" if index == last else ""), usage)
            await asyncio.sleep(BETWEEN)


async def bare(request: web.Request) -> web.StreamResponse:
    """What any aiohttp server has to do: read the body, write the events."""
    await request.json()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for _ in range(OUTPUT):
        await response.write(EVENT)
        await asyncio.sleep(BETWEEN)
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def serve(folder: Path) -> None:
    """The child: both servers, their ports on stdout, until its stdin closes."""
    from services.conductor.gateway.gateway import Gateway
    from services.conductor.gateway.http import Deadlines
    from services.conductor.gateway.offload import Offload
    from services.conductor.gateway.options import GatewayOptions
    from services.conductor.gateway.server import GatewayServer, Listen
    from services.conductor.gateway.tenants import Tenants
    from services.conductor.gateway.tokenizer import Tokenizer

    offload = Offload(1, 1000, 1 << 30)
    gateway = Gateway(AtOnce(), Tokenizer.load(folder), Tenants(None, time.monotonic), offload, GatewayOptions("bench"))
    app = web.Application()
    app.router.add_post("/v1/completions", bare)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with GatewayServer(gateway, Listen("127.0.0.1", 0, Deadlines(30, 30, 30, 30))) as server:
        print(server.port, runner.addresses[0][1], flush=True)
        await asyncio.to_thread(sys.stdin.read)
    offload.close()


async def measure(path: str, rounds: int) -> list[Row]:
    """Prompts as token ids (no tokenizing) and as text (with it)."""
    command = [sys.executable, "-m", "benchmarks.gateway", path]
    child = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        ports = [int(word) for word in (await child.stdout.readline()).split()]
        return await _compare(child.pid, dict(zip(("gateway", "bare aiohttp"), ports, strict=True)), path, rounds)
    finally:
        assert child.stdin is not None
        child.stdin.close()
        await child.wait()


async def _compare(pid: int, ports: dict[str, int], path: str, rounds: int) -> list[Row]:
    from tokenizers import Tokenizer

    rng = np.random.default_rng(3)
    tokenizer = Tokenizer.from_file(str(Path(path) / "tokenizer.json"))
    ids = [int(t) for t in rng.integers(1000, 40_000, PROMPT_TOKENS)]
    text = tokenizer.decode(ids)
    rows: list[Row] = []
    async with aiohttp.ClientSession() as session:
        medians: dict[str, float] = {}
        for kind, prompt in (("token ids", ids), ("text", text)):
            times: dict[str, list[float]] = {name: [] for name in ports}
            cpu: dict[str, float] = dict.fromkeys(ports, 0.0)
            for n in range(rounds + 20):
                for name, port in ports.items():
                    before = cpu_seconds(pid)
                    answer = await complete(
                        session, f"http://127.0.0.1:{port}", prompt, model="bench", max_tokens=OUTPUT, temperature=0
                    )
                    if n >= 20:  # the first ones warm up
                        times[name].append(1e3 * answer.ttft)
                        cpu[name] += cpu_seconds(pid) - before
            for name in ports:
                medians[f"{kind} {name}"] = float(np.median(times[name]))
                rows.append(row(f"TTFT, 2,000 tokens as {kind}", name, times[name], "ms", cpu[name] / rounds))
        added = medians["token ids gateway"] - medians["token ids bare aiohttp"]
        rows.append(
            Row("TTFT added, tokenizing apart", "gateway", added, "ms", rounds, note="medians' difference; budget 2")
        )
    tokenizing = []
    for _ in range(rounds):
        start = time.perf_counter()
        tokenizer.encode(text)
        tokenizing.append(1e3 * (time.perf_counter() - start))
    rows.append(row("tokenizing, 2,000 tokens", "tokenizers", tokenizing, "ms"))
    return rows


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
