"""``mooncake load`` against a real mesh, and two conductor processes of it that know each other's traces."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clients.live import conductor_beside
from tests.mesh.mesh import MOONCAKE, Mesh

pytestmark = [pytest.mark.mesh]

REQUESTS = 20
INPUT, OUTPUT = 200, 5


@pytest.fixture
def mesh(simulated: Callable[[], Mesh]) -> Mesh:
    return simulated()


def load(mesh: Mesh, *flags: str) -> dict[str, Any]:
    argv = [
        *(str(MOONCAKE), "load", "--url", mesh.url, "--json", "--generate", "random", "--requests", str(REQUESTS)),
        *("--rate", "40", "--set", f"input.mean={INPUT}", "--set", f"output.mean={OUTPUT}"),
        *("--set", "input.variation=0", "--set", "output.variation=0", "--vocabulary", "10:250"),
        *("--slo-ttft-ms", "600000", "--slo-tbt-ms", "60000", "--obey-retry-after", *flags),
    ]
    done = subprocess.run(argv, stdout=subprocess.PIPE, check=True, timeout=200)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


async def test_a_load_is_served_and_counted(mesh: Mesh, tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    cold = await asyncio.to_thread(load, mesh, "--records", str(records))
    assert (cold["completed"], cold["errors"], cold["rejected"], cold["uncounted"]) == (REQUESTS, 0, 0, 0)
    assert (cold["prompt_tokens"], cold["completion_tokens"]) == (REQUESTS * INPUT, REQUESTS * OUTPUT)
    assert cold["hit_by_token"] == 0.0 and cold["effective"] == 1.0
    outcomes = [json.loads(line) for line in records.read_text().splitlines()]
    assert all(one["end"] == "ok" and 0 < one["ttft"] <= one["ended"] - one["due"] for one in outcomes)
    await mesh.indexed()
    warm = await asyncio.to_thread(load, mesh)
    assert warm["completed"] == REQUESTS and warm["hit_by_token"] == (INPUT // 32) * 32 / INPUT
    salted = await asyncio.to_thread(load, mesh, "--salt", "7", "--prompt", "text", "--send-slo")
    assert (salted["completed"], salted["errors"]) == (REQUESTS, 0)


async def test_a_trace_is_found_at_a_conductor_that_did_not_serve_the_request(
    mesh: Mesh, tmp_path: Path, tokens: Callable[[int], list[int]]
) -> None:
    with conductor_beside(mesh, tmp_path) as one:
        beside = Mesh(one.url, mesh.child, one.log)
        for served, asked in ((mesh, beside), (beside, mesh)):
            answer = await served.ask(tokens(70), max_tokens=3)
            assert answer.status == 200
            id = {name.lower(): value for name, value in answer.headers.items()}["x-request-id"]
            ours, theirs = await trace_of(served, id), await trace_of(asked, id)
            assert ours["trace"] == theirs["trace"] and theirs["missing"] == {}
            names = {span["name"] for span in theirs["spans"]}
            assert {"POST /v1/completions", "schedule", "attempt", "prefill chunk", "decode"} <= names
            assert {span["span"] for span in ours["spans"]} <= {span["span"] for span in theirs["spans"]}


async def trace_of(mesh: Mesh, id: str) -> dict[str, Any]:
    """As soon as all that belongs to it has ended, and both conductors have heard of each other."""
    async with asyncio.timeout(100):
        while True:
            with contextlib.suppress(urllib.error.HTTPError):
                found: dict[str, Any] = await asyncio.to_thread(mesh.get, f"/trace/{id}")
                if {"decode", "commit"} <= {span["name"] for span in found["spans"]}:
                    return found
            await asyncio.sleep(0.05)
