"""ACCEPTANCE E1: one trace for a request through all processes, as an independent receiver gets it."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.mesh.mesh import MODEL, Mesh
from tests.mesh.receiver import Receiver, Span

pytestmark = [pytest.mark.mesh]

SLOW = {"MOONCAKE_SIMULATED_PREFILL_BASE_S": "0", "MOONCAKE_SIMULATED_PREFILL_TOKEN_S": "0.002"}
BELOW = {
    "attempt": {
        "fetch",
        "queue",
        "prefill chunk",
        "stream",
        "first token",
        "landing",
        "decode",
        "commit",
        "store.landing",
    },
    "stream": {"store.stream"},
    "store.stream": {"store.landed"},
    "store.source": {"store.lease"},
    "landing": {"store.fetch", "store.fetch shared"},
    "decode": {"commit"},
    "fetch": {"store.fetch", "store.fetch shared"},
    "store.fetch": {"store.source", "store.ssd"},
}


@pytest.fixture(scope="module")
def receiver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiver]:
    with Receiver(tmp_path_factory.mktemp("otlp")) as receiver:
        yield receiver


@pytest.fixture(scope="module")
def start(up: Callable[..., Mesh]) -> Callable[..., Mesh]:
    """A mesh of simulated engines whose prompts take two milliseconds a token, with these variables."""

    def begin(*flags: str, **variables: str) -> Mesh:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (SLOW | {"OTEL_BSP_SCHEDULE_DELAY": "200"} | variables).items():
                patch.setenv(name, value)
            return up("--engine", "simulated", "--prefill", "2", "--policy", "least_loaded", *flags)

    return begin


@pytest.fixture
def mesh(start: Callable[..., Mesh], receiver: Receiver) -> Mesh:
    """Spans over HTTP, all of them."""
    return start("--threads", "1", OTEL_EXPORTER_OTLP_ENDPOINT=receiver.http)


@pytest.fixture
def quiet(start: Callable[..., Mesh], receiver: Receiver) -> Mesh:
    """Spans over gRPC, and a sampler that wants none."""
    return start(
        *("--threads", "2"),
        OTEL_EXPORTER_OTLP_ENDPOINT=receiver.grpc,
        OTEL_EXPORTER_OTLP_PROTOCOL="grpc",
        OTEL_TRACES_SAMPLER="parentbased_always_off",
    )


def traceparent(sampled: bool) -> tuple[str, str, str]:
    """(trace, the client's span, header)."""
    trace, span = secrets.token_hex(16), secrets.token_hex(8)
    return trace, span, f"00-{trace}-{span}-{'01' if sampled else '00'}"


async def post(
    mesh: Mesh, prompt: str | list[int], headers: dict[str, str], **options: Any
) -> tuple[int, dict[str, Any]]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0, **options}
    async with mesh.session(headers) as http, http.post(f"{mesh.url}/v1/completions", json=body) as response:
        return response.status, await response.json()


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def parents_are_right(spans: list[Span], client: str = "") -> None:
    by_id = {span.id: span for span in spans}
    for span in spans:
        if span.name == "POST /v1/completions":
            assert span.parent == client
        else:
            assert span.parent in by_id, f"{span.name} hangs in the air"
            below = BELOW.get(by_id[span.parent].name, {"tokenize", "schedule", "attempt"})
            assert span.name in below, f"{span.name} under {by_id[span.parent].name}"


async def test_one_trace_with_right_parents(mesh: Mesh, receiver: Receiver, tokens: Callable[[int], list[int]]) -> None:
    trace, client, header = traceparent(True)
    prompt = tokens(100)
    status, answer = await post(mesh, prompt, {"traceparent": header})
    assert status == 200
    spans = receiver.wait(
        lambda got: all(named(got, name) for name in ("POST /v1/completions", "decode", "commit")),
        trace,
    )
    parents_are_right(spans, client)
    services = {span.service for span in spans}
    assert services == {f"mooncake-{name}" for name in ("conductor", "prefill", "decode", "store")}
    (root,) = named(spans, "POST /v1/completions")
    asked = root.attributes
    assert root.kind == "SPAN_KIND_SERVER" and asked["gen_ai.request.model"] == MODEL
    assert asked["gen_ai.usage.input_tokens"] == "100" and asked["gen_ai.usage.output_tokens"] == "8"
    assert asked["gen_ai.operation.name"] == "text_completion" and asked["mooncake.request"] in answer["id"]
    (schedule,) = named(spans, "schedule")
    assert len([one for one in schedule.events if one == "candidate"]) == 2, "both prefill instances were looked at"
    (decode,) = named(spans, "decode")
    assert "token" in decode.events
    assert sum(int(one.attributes["mooncake.tokens"]) for one in named(spans, "prefill chunk")) == 100
    assert named(spans, "store.landing"), "the agent at which the prompt landed has a part in it"
    assert all(int(one.attributes["mooncake.runs"]) for one in named(spans, "store.landed"))
    assert len(named(spans, "store.landed")) == len(named(spans, "store.stream")) > 0
    assert {span.status for span in spans} == {"STATUS_CODE_UNSET"}
    shown = "".join(f"{span.attributes}{span.events}" for span in spans)
    assert str(prompt[:8])[1:-1] not in shown, "the prompt is in the trace"


async def test_a_fetch_from_another_node_is_in_the_trace(
    mesh: Mesh, receiver: Receiver, tokens: Callable[[int], list[int]]
) -> None:
    """Two prefill nodes take turns: the second one brings what the first one has."""
    prompt = tokens(256)
    spans: list[Span] = []
    seen: list[Span] = []
    for _ in range(6):
        trace, _, header = traceparent(True)
        assert (await post(mesh, prompt, {"traceparent": header}))[0] == 200
        await mesh.indexed()
        spans = receiver.wait(lambda got: named(got, "POST /v1/completions") and named(got, "decode"), trace)
        if seen := named(spans, "store.fetch"):
            break
    assert seen, "nothing was fetched in six requests"
    assert int(seen[0].attributes["mooncake.blocks"]) > 0 and seen[0].service == "mooncake-store"
    sources = [span for span in named(spans, "store.source") if span.parent == seen[0].id]
    assert sum(int(span.attributes["mooncake.found"]) for span in sources) > 0
    assert sources[0].attributes["mooncake.transport"] in ("shm", "tcp")
    leases = [span for span in named(spans, "store.lease") if span.parent == sources[0].id]
    assert leases and int(leases[0].attributes["mooncake.found"]) > 0, "the agent that had the blocks says nothing"


async def test_nothing_that_was_said_is_in_any_span(mesh: Mesh, receiver: Receiver) -> None:
    trace, _, header = traceparent(True)
    status, answer = await post(mesh, "Rosebud, said Kane. " * 8, {"traceparent": header})
    assert status == 200
    spans = receiver.wait(lambda got: named(got, "POST /v1/completions") and named(got, "commit"), trace)
    shown = "".join(f"{span.name}{span.attributes}{span.events}{span.reason}" for span in spans)
    assert "osebud" not in shown and answer["choices"][0]["text"].strip() not in shown


async def test_the_clients_flag_is_respected_and_the_mesh_remembers(
    mesh: Mesh, receiver: Receiver, tokens: Callable[[int], list[int]]
) -> None:
    trace, client, header = traceparent(False)
    status, answer = await post(mesh, tokens(40), {"traceparent": header, "x-request-id": "mine"})
    assert status == 200
    later, _, other = traceparent(True)
    assert (await post(mesh, tokens(40), {"traceparent": other}))[0] == 200
    receiver.wait(lambda got: named(got, "POST /v1/completions"), later)
    assert receiver.spans(trace) == []
    for id in ("mine", answer["id"]):
        kept = await asyncio.to_thread(mesh.get, f"/trace/{id}")
        assert kept["trace"] == trace and kept["missing"] == {}
        assert {"schedule", "queue", "prefill chunk", "store.stream"} <= {span["name"] for span in kept["spans"]}
        assert [span["parent"] for span in kept["spans"] if span["kind"] == "server"] == [client]


async def test_a_batch_step_is_linked_to_those_it_served(
    mesh: Mesh, receiver: Receiver, tokens: Callable[[int], list[int]]
) -> None:
    """Asked until they met in a batch: where others keep the machine busy, one may end before the next is there."""

    async def asked() -> int:
        return (await post(mesh, tokens(40), {"traceparent": traceparent(True)[2]}, max_tokens=256))[0]

    async def met() -> list[Span]:
        assert set(await asyncio.gather(*(asked() for _ in range(4)))) <= {200, 429}
        await asyncio.sleep(1)  # what was computed is told a moment later
        return [span for span in named(receiver.spans(), "decode step") if span.links > 1]

    async with asyncio.timeout(200):
        while not (steps := await met()):
            pass
    assert {step.parent for step in steps} == {""}


async def test_cancelled_and_rejected_requests_end_with_a_status(
    mesh: Mesh, receiver: Receiver, tokens: Callable[[int], list[int]]
) -> None:
    trace, _, header = traceparent(True)
    await given_up(mesh, tokens(2000), {"traceparent": header})
    spans = receiver.wait(lambda got: named(got, "attempt") and named(got, "POST /v1/completions"), trace)
    root, attempt = named(spans, "POST /v1/completions")[0], named(spans, "attempt")[0]
    assert root.status == attempt.status == "STATUS_CODE_ERROR"
    assert root.attributes["error.type"] == "cancelled" and root.reason == "the client went away"
    trace, _, header = traceparent(True)
    status, _ = await post(mesh, tokens(2000), {"traceparent": header, "x-slo-ttft-ms": "1"})
    assert status == 429
    spans = receiver.wait(lambda got: named(got, "POST /v1/completions"), trace)
    (root,) = named(spans, "POST /v1/completions")
    assert root.status == "STATUS_CODE_ERROR" and root.attributes["http.response.status_code"] == "429"
    assert not named(spans, "attempt")
    (schedule,) = named(spans, "schedule")
    assert schedule.status == "STATUS_CODE_ERROR" and schedule.reason == schedule.attributes["mooncake.rejected"]
    predicted, allowed = (float(schedule.attributes[f"mooncake.{one}_ttft_s"]) for one in ("predicted", "objective"))
    assert predicted > allowed == 0.001 and schedule.events.count("candidate") == 2


def computing(mesh: Mesh) -> list[int]:
    """Processes of prefill instances that compute a prompt now."""
    return [one["pid"] for one in mesh.cluster()["instances"] if one["role"] == "prefill" and one["load"]["running"]]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(100):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.02)


async def given_up(mesh: Mesh, prompt: list[int], headers: dict[str, str]) -> None:
    """A client goes away while its prompt is computed, however long it took to get there."""
    asked = asyncio.create_task(post(mesh, prompt, headers))
    await until(lambda: computing(mesh))
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)


async def test_a_retried_request_has_both_attempts(
    mesh: Mesh, receiver: Receiver, tokens: Callable[[int], list[int]]
) -> None:
    """The instance that computes the prompt is killed."""
    trace, _, header = traceparent(True)
    await until(lambda: not computing(mesh))
    asked = asyncio.create_task(post(mesh, tokens(2000), {"traceparent": header}))
    await until(lambda: computing(mesh))
    os.kill(computing(mesh)[0], signal.SIGKILL)
    status, _ = await asked
    assert status == 200
    spans = receiver.wait(lambda got: len(named(got, "attempt")) == 2 and named(got, "POST /v1/completions"), trace)
    assert {one.status for one in named(spans, "attempt")} == {"STATUS_CODE_ERROR", "STATUS_CODE_UNSET"}
    assert named(spans, "POST /v1/completions")[0].status == "STATUS_CODE_UNSET"


async def test_what_the_sampler_leaves_out_is_sent_when_it_failed(
    quiet: Mesh, receiver: Receiver, tokens: Callable[[int], list[int]]
) -> None:
    """Over gRPC. One request goes well, one is refused, one is given up by its client."""
    before = {span.trace for span in receiver.spans()}
    assert (await post(quiet, tokens(40), {}))[0] == 200
    assert (await post(quiet, tokens(2000), {"x-slo-ttft-ms": "1"}))[0] == 429
    await given_up(quiet, tokens(2000), {})

    def new(got: list[Span]) -> dict[str, list[Span]]:
        traces: dict[str, list[Span]] = {}
        for span in got:
            if span.trace not in before:
                traces.setdefault(span.trace, []).append(span)
        return traces

    def whole(got: list[Span]) -> bool:
        sent = [{span.service for span in one} for one in new(got).values()]
        return len(sent) == 2 and {"mooncake-conductor", "mooncake-prefill"} <= set.union(*sent)

    for spans in new(receiver.wait(whole)).values():
        (root,) = named(spans, "POST /v1/completions")
        assert root.status == "STATUS_CODE_ERROR"


async def test_log_lines_of_a_request_name_it_and_its_trace(
    mesh: Mesh, receiver: Receiver, tokens: Callable[[int], list[int]]
) -> None:
    trace, _, header = traceparent(True)
    await until(lambda: len(computing(mesh)) == 0 and mesh.get("/cluster")["ready"])
    asked = asyncio.create_task(post(mesh, tokens(2000), {"traceparent": header}))
    await until(lambda: computing(mesh))
    os.kill(computing(mesh)[0], signal.SIGKILL)
    status, answer = await asked
    assert status == 200
    lines = [line for line in mesh.log.read_text().splitlines() if "attempt left" in line and trace in line]
    assert lines and all(answer["id"].removeprefix("cmpl-") in line for line in lines)
