"""A running ``mooncake up``: started, asked, looked into, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import redis
from prometheus_client.parser import text_string_to_metric_families

from shared.index import Layout
from shared.index.digest import unpack_state

BLOCK = 32
MODEL = "tiny"
LOOK = 0.05
"""Seconds between two looks at what is held."""
BASE = ("--block-size", str(BLOCK), "--pool-bytes", "64MiB", "--slo-ttft-ms", "600000", "--slo-tbt-ms", "60000")
MOONCAKE = Path(sys.executable).parent / "mooncake"


@dataclass
class Answer:
    """What a client saw. ``status`` is the HTTP status; ``error`` the envelope's inside."""

    status: int
    text: str = ""
    finish: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def cached(self) -> int:
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))


class Mesh:
    """A running ``mooncake up``: its HTTP address, its processes, what they say of themselves. ``key``: where it asks
    for one."""

    def __init__(self, url: str, child: subprocess.Popen[bytes], log: Path) -> None:
        self.url, self.child, self.log = url, child, log
        self.key = ""

    # -- requests ----------------------------------------------------------------------------------------------

    async def ask(
        self,
        prompt: Any,
        *,
        stream: bool = False,
        key: str = "",
        path: str = "/v1/completions",
        **options: Any,
    ) -> Answer:
        """One completion. ``stream`` changes how it travels, not what is returned."""
        body: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 16, **options}
        body |= {"messages": prompt} if path.endswith("chat/completions") else {"prompt": prompt}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with (
            self.session(_bearer(key or self.key)) as session,
            session.post(self.url + path, data=_json(body), headers=JSON) as response,
        ):
            if response.status == 200:
                return await (_streamed(response) if stream else _whole(response))
            error = (await response.json())["error"]
        if response.status == 429:  # obeyed, as by any client: it may be others that keep this machine busy
            await asyncio.sleep(int(response.headers["Retry-After"]))
            return await self.ask(prompt, stream=stream, key=key, path=path, **options)
        return Answer(response.status, error=error, headers=dict(response.headers))

    @contextlib.asynccontextmanager
    async def session(self, headers: dict[str, str] | None = None) -> AsyncIterator[aiohttp.ClientSession]:
        timeout = aiohttp.ClientTimeout(total=100)
        async with aiohttp.ClientSession(
            headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
        ) as session:
            yield session

    def get(self, path: str) -> Any:
        request = urllib.request.Request(self.url + path, headers=_bearer(self.key))
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    # -- what it says of itself --------------------------------------------------------------------------------

    def cluster(self) -> dict[str, Any]:
        cluster: dict[str, Any] = self.get("/cluster")
        return cluster

    def scrapes(self) -> dict[str, str]:
        """The metrics page of every process, by name."""
        cluster = self.cluster()
        pages = {"conductor": _text(f"{self.url}/metrics")}
        for one in [*cluster["instances"], *cluster["agents"]]:
            pages[f"{one.get('role', 'store')} {one['id']}"] = _text(f"http://{one['metrics']}/metrics")
        return pages

    def held(self) -> dict[str, float]:
        """Everything that is held anywhere now: {"process kind": amount}, zeros left out. Connections
        stay open, so they do not count."""
        out: dict[str, float] = {}
        for process, page in self.scrapes().items():
            for labels, value in _samples(page, "mooncake_held"):
                if value and "connection" not in labels["kind"]:
                    out[f"{process} {' '.join(f'{k}={v}' for k, v in sorted(labels.items()))}"] = value
        return out

    def total(self, name: str, **labels: str) -> float:
        """Sum of a sample over all processes."""
        found = 0.0
        for page in self.scrapes().values():
            found += sum(value for its, value in _samples(page, name) if labels.items() <= its.items())
        return found

    async def slot_bytes(self) -> int:
        """Size of a KV block, as the agents publish it within a heartbeat of their first engine."""
        while not all(sizes := [int(agent["slot_bytes"]) for agent in self.cluster()["agents"]]):
            await asyncio.sleep(0.1)
        return sizes[0]

    async def indexed(self, least: int = 0) -> None:
        """Wait until Redis and the conductor's mirror of it hold the same, ``least`` blocks or more, and rest."""
        url = psutil.Process(self.pid("services.conductor")).environ()["MOONCAKE_REDIS"]
        before, still = dict[str, int](), 0
        with redis.Redis.from_url(url) as server:
            while still < 4 or sum(before.values()) < least:
                await asyncio.sleep(LOOK)
                now = self.cluster()["index"]["blocks"]
                same = now == before and now == {agent: _in_redis(server, agent) for agent in now}
                before, still = now, still + 1 if same else 0

    async def settled(self, within: float = 2.0) -> dict[str, float]:
        """What is still held after ``within`` seconds; {} as soon as there is nothing. Looks are counted, not seconds:
        where others keep the machine busy, a look takes as much longer as the mesh does."""
        held: dict[str, float] = {}
        for _ in range(round(within / LOOK)):
            try:
                held = await asyncio.to_thread(self.held)
            except OSError as e:  # a process that has just died is still registered
                held = {f"not reachable: {e}": 1.0}
            if not held:
                break
            await asyncio.sleep(LOOK)
        return held

    # -- its processes -----------------------------------------------------------------------------------------

    def pid(self, module: str, words: str = "") -> int:
        """The process that runs ``python -m module`` with these words in its command line."""
        for process in psutil.Process(self.child.pid).children(recursive=True):
            line = " ".join(process.cmdline())
            if f"-m {module}" in line and words in line:
                return process.pid
        raise LookupError(f"{module} {words}")

    def stop(self) -> int:
        self.child.send_signal(signal.SIGINT)
        return self.child.wait(60)


JSON = {"Content-Type": "application/json"}


def _json(body: dict[str, Any]) -> io.BytesIO:
    """Of any size: as a file it is sent piece by piece."""
    return io.BytesIO(json.dumps(body).encode())


def _in_redis(server: redis.Redis, agent: str) -> int:
    """Blocks of an agent, by its code in hex, in all shards of the index."""
    pipe = server.pipeline(transaction=False)
    for taken in Layout("default").taken:
        pipe.hget(taken, bytes.fromhex(agent))
    return sum(unpack_state(state or b"").size for state in pipe.execute())


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _text(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def _samples(page: str, name: str) -> Iterator[tuple[dict[str, str], float]]:
    """Labels and value of each sample of that name. Only its lines are parsed: a page has a thousand, and is looked at
    twenty times a second."""
    wanted = "".join(f"{line}\n" for line in page.splitlines() if line.startswith(name))
    for family in text_string_to_metric_families(wanted):
        for sample in family.samples:
            if sample.name == name:
                yield sample.labels, sample.value


async def _whole(response: aiohttp.ClientResponse) -> Answer:
    body = await response.json()
    choice = body["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return Answer(200, text, choice["finish_reason"], body["usage"], headers=dict(response.headers))


async def _streamed(response: aiohttp.ClientResponse) -> Answer:
    answer, done = Answer(200, headers=dict(response.headers)), False
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            done = True
            continue
        event = json.loads(line[6:])
        answer.error = event.get("error") or answer.error
        answer.usage = event.get("usage") or answer.usage
        for choice in event.get("choices", ()):
            answer.text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            answer.finish = choice["finish_reason"] or answer.finish
    assert done or answer.error, "a stream must end with [DONE] or with an error event"
    return answer


def start_mesh(flags: Sequence[str], log: Path, patience: float = 240) -> Mesh:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    argv = [str(MOONCAKE), "up", "--port", str(port), *flags]
    with log.open("wb") as out:
        child = subprocess.Popen(
            argv,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ,
        )
    mesh, deadline = Mesh(f"http://127.0.0.1:{port}", child, log), time.monotonic() + patience
    while time.monotonic() < deadline and child.poll() is None:
        if b"Ready after" in log.read_bytes():  # every instance has joined
            return mesh
        time.sleep(0.1)
    child.kill()
    raise AssertionError("mooncake up is not ready:\n" + log.read_text(errors="replace")[-4000:])
