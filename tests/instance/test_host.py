"""``python -m services.prefill`` and ``services.decode`` as processes, with NATS, Redis and store agents."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from shared.embedded import NatsServer, RedisServer
from shared.engines.local import LocalRunner
from shared.engines.simulated import SimulatedEngine
from shared.engines.tiny import make_tiny_model
from shared.metadata import Metadata
from shared.nats_bus import NatsBus
from shared.records import InstanceRecord

pytestmark = [pytest.mark.mesh]


class Processes:
    """A mesh of real processes; each engine beside an agent of its own. What engines compute is for tests/mesh."""

    def __init__(self, model: Path, nats: str, redis: str) -> None:
        self.model = model
        self.name = uuid4().hex[:8]
        self.common = ["--mesh", self.name, "--nats", nats, "--redis", redis, "--metrics-port", "0"]
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def spawn(self, kind: str, node: str, *flags: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", f"services.{kind}", "--node", node, *self.common, *flags]
        environment = os.environ | {"MOONCAKE_SECRET": "between us", "MOONCAKE_SIMULATED_DECODE_BASE_S": "0.02"}
        process = self.running[f"{kind}-{node}"] = subprocess.Popen(argv, env=environment)
        return process

    def agent(self, node: str) -> subprocess.Popen[bytes]:
        return self.spawn("store", node, "--socket", self.socket(node), "--pool-bytes", "16MiB")

    def engine(self, kind: str, node: str) -> subprocess.Popen[bytes]:
        flags = [
            "--agent",
            self.socket(node),
            "--engine",
            "simulated",
            "--model",
            str(self.model),
            "--block-size",
            "16",
        ]
        return self.spawn(kind, node, *flags)

    def socket(self, node: str) -> str:
        return f"@{self.name}-{node}"

    def kill(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                process.kill()
            process.wait()


async def until(metadata: Metadata, count: int, seconds: float = 150.0) -> dict[str, InstanceRecord]:
    """Wait for exactly ``count`` registered instances."""
    async with asyncio.timeout(seconds):
        while len(found := await metadata.instances()) != count:
            await asyncio.sleep(0.1)
    return {record.role: record for record in found}


def metrics_of(record: InstanceRecord, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{record.metrics}{path}", timeout=60) as answer:
        return str(answer.read().decode())


def mismatches(record: InstanceRecord) -> list[str]:
    """What the simulated engine of this process found in the pool that its like had not written."""
    lines = metrics_of(record).splitlines()
    found = [line for line in lines if line.startswith("mooncake_simulated_kv_mismatches_total")]
    assert found
    return [line for line in found if not line.endswith(" 0.0")]


@contextlib.asynccontextmanager
async def gateway_over(kit: Any, nats: NatsBus, records: dict[str, InstanceRecord]) -> AsyncIterator[Any]:
    """The kit's gateway on the real bus, with these two instances."""
    base = kit.mesh(prefills=0, decodes=0)
    base.namespace = records["prefill"].namespace
    base.gateway.bus = nats
    base.prefills, base.decodes = [records["prefill"]], [records["decode"]]
    await base.gateway.start()
    try:
        yield base.gateway
    finally:
        for task in base.tasks:
            task.cancel()
        await asyncio.gather(*base.tasks, return_exceptions=True)


def alone(model: Path, tokens: list[int], sampling: Any) -> list[int]:
    with LocalRunner(SimulatedEngine(model, block_size=16), slots=64) as runner:
        return [o.token for o in runner.generate(tokens, sampling)]


async def test_life_of_the_processes(kit: Any, tmp_path: Path) -> None:
    """Register, serve, survive the death of an agent, hand over and leave with exit code 0."""
    model = make_tiny_model(tmp_path / "tiny")
    tokens, sampling = kit.tokens(70), kit.greedy(8)
    expected = alone(model, tokens, sampling)
    with NatsServer() as nats, RedisServer() as redis:
        mesh = Processes(model, nats.url, redis.url)
        try:
            for kind, node in (("prefill", "a"), ("decode", "b")):
                mesh.agent(node)
                mesh.engine(kind, node)
            async with (
                Metadata(redis.url, mesh.name) as metadata,
                await NatsBus.connect(nats.url, mesh.name, name="g") as bus,
            ):
                records = await until(metadata, 2)
                assert records["prefill"].prefill and records["decode"].decode
                for record in records.values():
                    assert await asyncio.to_thread(metrics_of, record, "/ready") == '{"ready": true, "reasons": []}'
                assert records["prefill"].proof == records["prefill"].namespace.proof()
                async with gateway_over(kit, bus, records) as gateway:
                    cold = await gateway.run(tokens, sampling)
                    warm = await gateway.run(tokens, sampling)
                    assert (cold.tokens, warm.tokens) == (expected, expected)
                    assert warm.usage.cached_tokens == 64

                    mesh.running["store-b"].kill()
                    mesh.running["store-b"].wait()
                    mesh.agent("b")
                    async with asyncio.timeout(200):
                        while (await until(metadata, 2))["decode"].agent == records["decode"].agent:
                            await asyncio.sleep(0.1)
                    again = await gateway.run(tokens, sampling)
                    assert again.tokens == expected
                    for record in (await until(metadata, 2)).values():
                        assert await asyncio.to_thread(mismatches, record) == []

                    long = asyncio.ensure_future(gateway.run(tokens, kit.greedy(400), attempts=1, name="long"))
                    async with asyncio.timeout(200):
                        while not (s := gateway.streams.get(("long", 1))) or len(s.delivered) < 3:
                            await asyncio.sleep(0.01)
                    for kind, node in (("decode", "b"), ("prefill", "a")):
                        mesh.running[f"{kind}-{node}"].send_signal(signal.SIGTERM)
                    with pytest.raises(AssertionError, match="draining"):
                        await long
                for kind, node in (("decode", "b"), ("prefill", "a")):
                    assert await asyncio.to_thread(mesh.running[f"{kind}-{node}"].wait, 10) == 0
                await until(metadata, 0, 5.0)
        finally:
            mesh.kill()
