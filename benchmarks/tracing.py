"""What spans and metrics cost in TTFT and tokens a second: none, kept in memory, 1 % and 100 % sent, and scraped."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import random
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp

from benchmarks.client import Answer, complete
from benchmarks.processes import Mesh, free_port, mesh
from benchmarks.report import Row, row

AT_ONCE = {
    "MOONCAKE_SIMULATED_PREFILL_BASE_S": "0",
    "MOONCAKE_SIMULATED_PREFILL_TOKEN_S": "0",
    "MOONCAKE_SIMULATED_PREFILL_SQUARE_S": "0",
    "MOONCAKE_SIMULATED_DECODE_BASE_S": "0.001",
}
"""An engine that takes no time for a prompt and a millisecond for a step: what is left is ours."""

BURST, TOKENS, PROMPT, ALONE = 16, 64, 256, 10
SCRAPE = 1.0
NONE, KEPT, SOME, ALL, SCRAPED = "none", "kept in memory", "1 % sent", "100 % sent", "kept, scraped every second"


def variables(endpoint: str) -> dict[str, dict[str, str]]:
    """Contender -> its environment. The default is ``kept in memory``."""
    sends = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
    some = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"}
    return {NONE: {"MOONCAKE_TRACE_REQUESTS": "0"}, KEPT: {}, SOME: sends | some, ALL: sends, SCRAPED: {}}


async def measure(model: str, rounds: int) -> list[Row]:
    """Five meshes at once, each asked in turn; every round begins with another one."""
    rng = random.Random(11)
    with contextlib.ExitStack() as stack:
        contenders = variables(stack.enter_context(receiver()))
        running = {name: stack.enter_context(started(env)) for name, env in contenders.items()}
        ttft: dict[str, list[float]] = {name: [] for name in running}
        speed: dict[str, list[float]] = {name: [] for name in running}
        cpu = dict.fromkeys(running, 0.0)
        async with aiohttp.ClientSession() as session:
            for one in running.values():
                await burst(session, one, model, rng)  # the first of everything
            for turn in range(rounds):
                names = list(running)
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    async with scraped(session, running[name], name == SCRAPED):
                        before = running[name].cpu()
                        for _ in range(ALONE):
                            ttft[name].append((await ask(session, running[name], model, rng, 1)).ttft)
                        speed[name].append(await burst(session, running[name], model, rng))
                        cpu[name] += running[name].cpu() - before
    what = f"{PROMPT} tokens, engine that takes no time"
    rows = [row(f"TTFT, {what}", name, [1e3 * t for t in ttft[name]], "ms") for name in ttft]
    rows += [row(f"{BURST} streams, {what}", name, speed[name], "tokens/s", cpu[name] / rounds) for name in speed]
    for name in (KEPT, SOME, ALL, SCRAPED):
        ratios = [a / b for a, b in zip(speed[name], speed[NONE if name != SCRAPED else KEPT], strict=True)]
        against = KEPT if name == SCRAPED else NONE
        rows.append(row(f"tokens/s against {against}", name, ratios, "ratio"))
    return rows


async def ask(session: aiohttp.ClientSession, one: Mesh, model: str, rng: random.Random, tokens: int) -> Answer:
    prompt = [rng.randrange(1000, 40_000) for _ in range(PROMPT)]
    answer = await complete(session, one.url, prompt, model=model, max_tokens=tokens, temperature=0, ignore_eos=True)
    if answer.error:
        raise RuntimeError(answer.error)
    return answer


async def burst(session: aiohttp.ClientSession, one: Mesh, model: str, rng: random.Random) -> float:
    """Tokens a second of several streams at once."""
    began = asyncio.get_running_loop().time()
    await asyncio.gather(*(ask(session, one, model, rng, TOKENS) for _ in range(BURST)))
    return BURST * TOKENS / (asyncio.get_running_loop().time() - began)


@contextlib.asynccontextmanager
async def scraped(session: aiohttp.ClientSession, one: Mesh, wanted: bool) -> AsyncIterator[None]:
    async def scrape() -> None:
        cluster = await asyncio.to_thread(one.get, "/cluster")
        urls = [f"http://{each['metrics']}/metrics" for each in (*cluster["instances"], *cluster["agents"])]
        while True:
            for url in (*urls, one.url + "/metrics"):
                async with session.get(url) as response:
                    await response.read()
            await asyncio.sleep(SCRAPE)

    task = asyncio.create_task(scrape()) if wanted else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()


@contextlib.contextmanager
def started(env: dict[str, str]) -> Iterator[Mesh]:
    before = dict(os.environ)
    os.environ.update(AT_ONCE | env)
    try:
        running = mesh("--engine", "simulated", "--slo-ttft-ms", "600000", "--slo-tbt-ms", "60000")
        with running as one:
            os.environ.clear()
            os.environ.update(before)
            yield one
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def receiver() -> Iterator[str]:
    """An independent OTLP receiver that throws everything away; its HTTP endpoint."""
    spec = importlib.util.find_spec("rotel")
    if spec is None or spec.origin is None:
        raise RuntimeError("rotel is not installed: make install")
    http, grpc = free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        argv = [str(Path(spec.origin).parent / "rotel-agent"), "start", "--exporter", "blackhole"]
        argv += ["--otlp-http-endpoint", f"127.0.0.1:{http}", "--otlp-grpc-endpoint", f"127.0.0.1:{grpc}"]
        argv += ["--pid-file", f"{folder}/pid", "--log-file", f"{folder}/log"]
        child = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        try:
            yield f"http://127.0.0.1:{http}"
        finally:
            child.kill()
            child.wait()
