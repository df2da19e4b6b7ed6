"""Streams at scale: 1,000 at once through one conductor over the simulated engine; its CPU, memory and loop lag.

The client is a process of its own. CPU is the conductor's alone, from the kernel's accounts. The contender is a bare
aiohttp handler that writes as many events to as many streams at the same pace.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.processes import Mesh, mesh
from benchmarks.report import Row, row
from benchmarks.stream_client import Job, Result, in_child

ALONE_TOKENS = 1
FAST, STEP = 32, 0.02
ARRIVALS = 50.0  # new streams a second
EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1700000000,'
    b'"model":"m","system_fingerprint":"fp_0123456789ab","choices":[{"index":0,"text":" word","logprobs":null,'
    b'"finish_reason":null}],"usage":null}\n\n'
)
LAST = b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\ndata: [DONE]\n\n'
LAG = "mooncake_event_loop_lag_seconds_bucket"


@dataclass
class Watched:
    """What a process used between two moments. ``rss``: bytes, once a second; ``cpu``: seconds; ``lag``: upper bounds
    in seconds of (median, 99 %, worst) lateness of its event loop's timers."""

    rss: list[int] = field(default_factory=list)
    cpu: float = 0.0
    lag: tuple[float, float, float] = (0.0, 0.0, 0.0)


@contextlib.asynccontextmanager
async def watched(pid: int, metrics: str = "") -> AsyncIterator[Watched]:
    """Watch process ``pid`` while the block runs; ``metrics``: URL of its page, where it has one."""
    process, watch = psutil.Process(pid), Watched()

    async def look() -> None:
        while True:
            watch.rss.append(process.memory_info().rss)
            await asyncio.sleep(1.0)

    before, lag = process.cpu_times(), await asyncio.to_thread(buckets, metrics)
    task = asyncio.create_task(look())
    await asyncio.sleep(0)
    try:
        yield watch
    finally:
        task.cancel()
        after, late = process.cpu_times(), await asyncio.to_thread(buckets, metrics)
        watch.rss.append(process.memory_info().rss)
        watch.cpu = after.user + after.system - before.user - before.system
        counts = {bound: late[bound] - lag.get(bound, 0.0) for bound in late}
        watch.lag = (quantile(counts, 0.5), quantile(counts, 0.99), quantile(counts, 1.0))


def buckets(url: str) -> dict[float, float]:
    """Cumulative counts of the loop lag by upper bound."""
    if not url:
        return {}
    with urllib.request.urlopen(url, timeout=30) as page:
        families = text_string_to_metric_families(page.read().decode())
        samples = [sample for family in families for sample in family.samples if sample.name == LAG]
    return {float(sample.labels["le"]): sample.value for sample in samples}


def quantile(counts: dict[float, float], share: float) -> float:
    """The upper bound of the bucket in which that share of the observations is reached."""
    total = max(counts.values(), default=0.0)
    return next((bound for bound in sorted(counts) if total and counts[bound] >= share * total), 0.0)


@contextlib.contextmanager
def simulated(path: str, step: float) -> Iterator[tuple[Mesh, int]]:
    """A mesh over the model in ``path`` whose decode steps take ``step`` seconds, and its conductor's pid."""
    settings = {
        "MOONCAKE_SIMULATED_PREFILL_BASE_S": "0",
        "MOONCAKE_SIMULATED_PREFILL_TOKEN_S": "0",
        "MOONCAKE_SIMULATED_DECODE_BASE_S": str(step),
        "MOONCAKE_SIMULATED_DECODE_SEQUENCE_S": "0",
        "MOONCAKE_SIMULATED_DECODE_TOKEN_S": "0",
        "MOONCAKE_MAX_BATCH": "2048",
    }
    flags = (
        "--model",
        path,
        "--engine",
        "simulated",
        "--context-length",
        "131072",
        "--pool-bytes",
        "512MiB",
        "--block-size",
        "32",
    )
    slos = ("--slo-ttft-ms", "600000", "--slo-tbt-ms", "60000")
    os.environ.update(settings)
    try:
        with mesh(*flags, *slos) as running:
            children = psutil.Process(running.pid).children(recursive=True)
            yield running, next(c.pid for c in children if "services.conductor" in c.cmdline())
    finally:
        for name in settings:
            os.environ.pop(name, None)


def job(url: str, model: str, **options: Any) -> Job:
    host, _, port = url.removeprefix("http://").partition(":")
    return Job(host, int(port), model, **options)


# -- the contender ---------------------------------------------------------------------------------------------


def bare_handler(period: float, tokens: int) -> Any:
    async def handler(request: web.Request) -> web.StreamResponse:
        await request.json()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        due = time.perf_counter()
        for _ in range(tokens):
            due += period
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await response.write(EVENT)
        await response.write(LAST % tokens)
        await response.write_eof()
        return response

    return handler


async def serve_bare(period: float, tokens: int) -> None:
    """The child: its port on stdout, until its stdin closes."""
    app = web.Application()
    app.router.add_post("/v1/completions", bare_handler(period, tokens))
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def bare(streams: int, tokens: int, ramp: float, period: float) -> tuple[Result, Watched]:
    command = [sys.executable, "-m", "benchmarks.streams", str(period), str(tokens)]
    child = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdin is not None
    try:
        url = f"http://127.0.0.1:{int(await child.stdout.readline())}"
        async with watched(child.pid) as watch:
            result = await in_child(job(url, "m", streams=streams, max_tokens=tokens, ramp=ramp))
        return result, watch
    finally:
        child.stdin.close()
        await child.wait()


# -- the suite -------------------------------------------------------------------------------------------------


async def measure(path: str, model: str, seconds: float, streams: int, rate: float) -> list[Row]:
    """``streams`` streams of ``rate`` tokens a second each, all at once for ``seconds``; then half as many tokens as
    fast as it goes; then beside a slow reader. ``path``: folder of the model, served as ``model``."""
    rows: list[Row] = []
    ramp = streams / ARRIVALS
    tokens = max(2, round(rate * (seconds + ramp)))
    with simulated(path, 1 / rate) as (running, pid):
        per_request = await _requests(running, pid, model, rows)
        what = f"{streams} streams, {rate:g} tokens/s each"
        await _streams(rows, what, (running, pid), per_request, (model, streams, tokens, ramp))
        await _bare(rows, what, (streams, tokens, ramp), 1 / rate)
    tokens = max(2, tokens // 2)
    with simulated(path, 0.0) as (running, pid):
        what = f"{streams} streams, as fast as it goes"
        await _streams(rows, what, (running, pid), per_request, (model, streams, tokens, ramp))
        await _bare(rows, what, (streams, tokens, ramp), 0.0)
    with simulated(path, STEP) as (running, pid):
        await _slow(rows, running, pid, model)
    return rows


async def _streams(
    rows: list[Row], what: str, at: tuple[Mesh, int], per_request: float, load: tuple[str, int, int, float]
) -> None:
    (running, pid), (model, streams, tokens, ramp) = at, load
    async with watched(pid, running.url + "/metrics") as watch:
        result = await in_child(job(running.url, model, streams=streams, max_tokens=tokens, ramp=ramp))
    _rows(rows, what, "gateway", result, watch, per_request)


async def _bare(rows: list[Row], what: str, load: tuple[int, int, float], period: float) -> None:
    result, watch = await bare(*load, period)
    _rows(rows, what, "bare aiohttp", result, watch, 0.0)


async def _requests(running: Mesh, pid: int, model: str, rows: list[Row]) -> float:
    """CPU seconds of a request with a single token."""
    await in_child(job(running.url, model, streams=50, max_tokens=ALONE_TOKENS, ramp=2.0))
    samples = []
    for _ in range(5):
        async with watched(pid) as watch:
            result = await in_child(job(running.url, model, streams=100, max_tokens=ALONE_TOKENS, ramp=2.0))
        samples.append(1e3 * watch.cpu / max(result.done, 1))
    rows.append(row("CPU of a request with one token", "gateway", samples, "ms"))
    return statistics.median(samples) / 1e3


def _rows(rows: list[Row], what: str, who: str, result: Result, watch: Watched, per_request: float) -> None:
    rate = result.tokens / result.seconds if result.seconds else 0.0
    note = ", ".join(f"{count} × {why}" for why, count in result.errors.items())
    errors = sum(result.errors.values())
    rows.append(Row(f"{what}: errors", who, errors, "streams", result.done + errors, note=note))
    rows.append(Row(f"{what}: tokens", who, rate, "tokens/s", result.tokens, cpu_s=watch.cpu))
    cpu = 1e6 * (watch.cpu - per_request * result.done) / max(result.tokens, 1)
    note = "of the process, requests' own share taken off" if per_request else "of the process"
    rows.append(Row(f"{what}: CPU per token", who, cpu, "µs", result.tokens, note=note))
    rows.append(row(f"{what}: TTFT", who, [1e3 * t for t in result.ttft], "ms"))
    rows.append(row(f"{what}: longest pause of a stream", who, [1e3 * gap for gap in result.gaps], "ms"))
    for name, value in zip(("start", "peak", "end"), (watch.rss[0], max(watch.rss), watch.rss[-1]), strict=True):
        rows.append(Row(f"{what}: memory at {name}", who, value / 2**20, "MiB", 1))
    if watch.lag[0]:
        for name, lag in zip(("median", "99 %", "worst"), watch.lag, strict=True):
            rows.append(Row(f"{what}: loop lag, {name}", who, 1e3 * lag, "ms", note="upper bound of its bucket"))


async def _slow(rows: list[Row], running: Mesh, pid: int, model: str) -> None:
    """32 fast readers, without and with one that reads 10 bytes a second, in turn."""
    rates: dict[int, list[float]] = {0: [], 1: []}
    grown, cut = 0.0, 0
    for slow in (0, 1) * 3:
        async with watched(pid) as watch:
            task = job(
                running.url, model, streams=FAST, max_tokens=400, slow=slow, slow_seconds=10.0, slow_tokens=40_000
            )
            result = await in_child(task)
        rates[slow].append(result.tokens / result.seconds / FAST)
        if slow:
            grown, cut = max(grown, (max(watch.rss) - watch.rss[0]) / 2**20), cut + result.slow_cut
    rows.append(row(f"{FAST} fast readers, each", "without a slow one", rates[0], "tokens/s"))
    rows.append(row(f"{FAST} fast readers, each", "beside one at 10 bytes/s", rates[1], "tokens/s"))
    rows.append(Row("memory grown beside a slow reader", "gateway", grown, "MiB", 3, note=f"{cut} cut off"))


if __name__ == "__main__":
    asyncio.run(serve_bare(float(sys.argv[1]), int(sys.argv[2])))
