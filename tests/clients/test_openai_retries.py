"""A12: where a mesh is asked for more than its objective allows, the `openai` client waits as long as our 429 says, and
is then served."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAI, RateLimitError
from prometheus_client.parser import text_string_to_metric_families

from tests.clients.live import KEY, Conductor, conductor_beside
from tests.mesh.mesh import MODEL, Mesh

pytestmark = [pytest.mark.mesh]

PROMPT_TOKENS = 1200
AT_ONCE = 32
PATIENT = 60


@pytest.fixture(scope="module")
def tight(mesh: Mesh, client: OpenAI, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Conductor]:
    """A conductor before the same instances, whose objective leaves time for some four of :data:`AT_ONCE` prompts."""
    took = []
    for seed in range(4):
        began = time.monotonic()
        client.completions.create(**_ask(seed))
        took.append(time.monotonic() - began)
    objective = max(200, int(4000 * min(took)))
    with conductor_beside(mesh, tmp_path_factory.mktemp("tight"), slo_ttft_ms=objective) as conductor:
        yield conductor


def _ask(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    return {"model": MODEL, "prompt": [rng.randrange(10, 250) for _ in range(PROMPT_TOKENS)], "max_tokens": 1}


def _outcomes(conductor: Conductor) -> dict[str, float]:
    """Completions answered so far, by outcome."""
    return {
        sample.labels["outcome"]: sample.value
        for family in text_string_to_metric_families(conductor.metrics())
        for sample in family.samples
        if sample.name == "mooncake_gateway_requests_total" and sample.labels["route"] == "completions"
    }


class Listener:
    """Hooks of an HTTP client: what each request said of its own retries, and what a 429 asked it to wait, in ms."""

    def __init__(self) -> None:
        self.counts: dict[str, list[int]] = defaultdict(list)
        self.waits: dict[str, list[int]] = defaultdict(list)

    async def request(self, request: httpx2.Request) -> None:
        self.counts[request.headers["x-request-id"]].append(int(request.headers["x-stainless-retry-count"]))

    async def response(self, response: httpx2.Response) -> None:
        if response.status_code == 429:
            wait = int(response.headers["retry-after-ms"])
            assert int(response.headers["retry-after"]) == max(1, math.ceil(wait / 1000))
            self.waits[response.request.headers["x-request-id"]].append(wait)

    def client(self, conductor: Conductor, retries: int) -> AsyncOpenAI:
        hooks: Any = {"request": [self.request], "response": [self.response]}
        http = DefaultAsyncHttpxClient(event_hooks=hooks)
        return AsyncOpenAI(
            base_url=conductor.url + "/v1", api_key=KEY, max_retries=retries, timeout=200, http_client=http
        )


async def test_a12_retries_honour_our_429(tight: Conductor, mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="openai")
    listener = Listener()
    before = _outcomes(tight)
    async with listener.client(tight, PATIENT) as client:
        answers = await asyncio.gather(
            *(
                client.completions.with_raw_response.create(**_ask(100 + i), extra_headers={"X-Request-Id": f"r{i}"})
                for i in range(AT_ONCE)
            )
        )
    assert all(answer.parse().usage for answer in answers), "everybody is served in the end"
    after = _outcomes(tight)
    refused = sum(map(len, listener.waits.values()))
    assert refused > 0, "the mesh was asked for more than it could do in time"
    assert after["contended"] - before.get("contended", 0) == refused
    assert after["ok"] - before.get("ok", 0) == AT_ONCE
    for i, answer in enumerate(answers):
        waits = listener.waits[f"r{i}"]
        assert answer.retries_taken == len(waits)
        assert listener.counts[f"r{i}"] == list(range(len(waits) + 1))
    logged = [record.args for record in caplog.records if record.msg.startswith("Retrying request in")]
    slept = Counter(args[0] for args in logged if isinstance(args, tuple))
    asked = Counter(wait / 1000 for waits in listener.waits.values() for wait in waits)
    assert slept == asked, "it waits what the header says, not what it would by itself"
    assert await mesh.settled() == {}


async def test_a_client_that_does_not_retry_gets_the_429(tight: Conductor) -> None:
    listener = Listener()
    async with listener.client(tight, 0) as client:
        named = client.with_options(default_headers={"X-Request-Id": "n"})
        outcomes = await asyncio.gather(
            *(named.completions.create(**_ask(1000 + i), stream=bool(i % 2)) for i in range(AT_ONCE)),
            return_exceptions=True,
        )
        refused = [one for one in outcomes if isinstance(one, BaseException)]
    assert refused
    for error in refused:
        assert isinstance(error, RateLimitError)
        assert (error.status_code, error.code, error.type) == (429, "contended", "rate_limit_error")
        assert int(error.response.headers["retry-after-ms"]) > 0
