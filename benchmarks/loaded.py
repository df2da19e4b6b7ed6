"""A mesh under ``mooncake load``: started with variables of its own, replayed against, and its metrics afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil
import redis
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.processes import MOONCAKE, Mesh, mesh
from shared.index import Layout

PLACE = 9
"""Bytes of one place of a block in the index: the agent's code, and the tier."""


@contextlib.contextmanager
def started(env: Mapping[str, str], *flags: str) -> Iterator[Mesh]:
    """``mooncake up`` with these variables and flags."""
    before = dict(os.environ)
    os.environ.update(env)
    try:
        with mesh(*flags) as running:
            yield running
    finally:
        os.environ.clear()
        os.environ.update(before)


def load(running: Mesh, *flags: str, timeout: float = 300.0) -> dict[str, Any]:
    """Runs ``mooncake load --json`` against it; its figures. Raises CalledProcessError."""
    command = [str(MOONCAKE), "load", "--url", running.url, "--json", *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=timeout)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def total(running: Mesh, name: str, **labels: str) -> float:
    """Sum of a sample over all store agents and the conductor."""
    pages = [f"{running.url}/metrics"]
    pages += [f"http://{agent['metrics']}/metrics" for agent in running.get("/cluster")["agents"]]
    return sum(
        sample.value
        for page in pages
        for family in text_string_to_metric_families(_text(page))
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def buckets(running: Mesh, name: str) -> list[tuple[float, float]]:
    """(upper bound, how many are at most that) of a histogram of the conductor."""
    return [
        (float(sample.labels["le"]), sample.value)
        for family in text_string_to_metric_families(_text(f"{running.url}/metrics"))
        for sample in family.samples
        if sample.name == f"{name}_bucket"
    ]


def copies(running: Mesh, role: str) -> list[int]:
    """For every block that is indexed: how many agents of nodes of this role have it, most first."""
    cluster = running.get("/cluster")
    nodes = {instance["node"] for instance in cluster["instances"] if instance["role"] == role}
    codes = {bytes.fromhex(agent["code"]) for agent in cluster["agents"] if agent["node"] in nodes}
    held = defaultdict[bytes, int](int)
    with redis.Redis.from_url(_redis(running)) as server:
        for blocks in Layout("default").blocks:
            for key, places in server.hscan_iter(blocks, count=1000):
                held[key] += sum(places[at : at + PLACE - 1] in codes for at in range(0, len(places), PLACE))
    return sorted((count for count in held.values() if count), reverse=True)


def _redis(running: Mesh) -> str:
    """The mesh's own, from the environment of its conductor."""
    for process in psutil.Process(running.pid).children(recursive=True):
        if "services.conductor" in _line(process):
            return str(process.environ()["MOONCAKE_REDIS"])
    raise RuntimeError("the mesh has no conductor")


def _line(process: psutil.Process) -> Sequence[str]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(process.cmdline())
    return []


def _text(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())
