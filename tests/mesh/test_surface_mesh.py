"""ACCEPTANCE A5, A7, A13, A14 against a live mesh: what hostile and clumsy clients send harms nobody."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.parse
from collections.abc import Callable
from typing import Any

import jsonschema
import psutil
import pytest

from tests.gateway.wire import BROKEN, HOSTILE_IDS, answer, assert_raw_envelope, raw
from tests.mesh.mesh import MODEL, Mesh

pytestmark = [pytest.mark.mesh]

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {TEXT: {"model": MODEL, "prompt": "x"}, CHAT: {"model": MODEL, "messages": USER}}
BAD: list[dict[str, Any]] = [
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": "5"},
    {"max_tokens": 10**9},
    {"max_tokens": 10**30},
    {"max_tokens": 1.5},
    {"temperature": -0.1},
    {"temperature": 2.1},
    {"temperature": "hot"},
    {"top_p": 0},
    {"seed": 2**63},
    {"n": 0},
    {"stop": ["a"] * 17},
    {"logit_bias": {"x": 1}},
    {"stream": "yes"},
    {"nonsense": 1},
    {"model": ""},
    {"model": None},
]
PROMPTS: list[Any] = ["", [], [""], [[]], [-1], [2**32], [10**6], ["a", 1], None, {"a": 1}]
TURNS: list[Any] = [[], None, "x", [{}], [{"role": "user"}], [{"role": "robot", "content": "x"}]]
BAD_OF = {TEXT: [{"prompt": prompt} for prompt in PROMPTS], CHAT: [{"messages": turns} for turns in TURNS]}


@pytest.fixture
def mesh(simulated: Callable[[], Mesh]) -> Mesh:
    return simulated()


def port(mesh: Mesh) -> int:
    return int(urllib.parse.urlsplit(mesh.url).port or 0)


async def test_a5_bad_values_are_refused_by_name(mesh: Mesh) -> None:
    async with mesh.session() as http:
        for path, base in BODIES.items():
            for bad in [*BAD, *BAD_OF[path]]:
                for stream in (False, True):
                    async with http.post(mesh.url + path, json=base | {"stream": stream} | bad) as response:
                        error = (await response.json())["error"]
                        assert response.status == 400, (bad, error)
                        named = re.split(r"[.\[]", error["param"])[0]
                        assert named in {*bad, "prompt", "messages"}, (bad, error)
                        assert re.fullmatch(r"[0-9a-f]{32}", response.headers["X-Request-Id"])
    assert (await mesh.ask([5] * 8)).status == 200
    assert await mesh.settled() == {}


async def test_a7_a_body_of_50_mb_is_413_and_costs_no_memory(mesh: Mesh) -> None:
    conductor = psutil.Process(mesh.pid("services.conductor"))
    before = conductor.memory_info().rss
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    for length in ("Content-Length: 52428800", "Transfer-Encoding: chunked"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port(mesh))
        writer.write(f"{head}{length}\r\n\r\n".encode())
        piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n" if "chunked" in length else b" " * 0x10000
        refused = asyncio.create_task(answer(reader))
        for _ in range(50 * 16):
            if refused.done():
                break
            try:
                writer.write(piece)
                await asyncio.wait_for(writer.drain(), 100)
            except (ConnectionError, TimeoutError):
                break
        async with asyncio.timeout(100):
            assert_raw_envelope(await refused, 413)
        writer.close()
    assert conductor.memory_info().rss - before < 40 * 2**20
    assert (await mesh.ask([5] * 8)).status == 200


async def test_a13_one_request_id_twice_at_once_and_after_a_cancel(
    mesh: Mesh, tokens: Callable[[int], list[int]]
) -> None:
    prompts = [tokens(40), tokens(40)]
    alone = [(await mesh.ask(prompt, max_tokens=24, ignore_eos=True)).text for prompt in prompts]
    async with mesh.session({"X-Request-Id": "same"}) as http:

        async def ask(prompt: list[int]) -> tuple[str, str, str]:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            async with http.post(mesh.url + TEXT, json=body) as response:
                whole = await response.json()
                return whole["choices"][0]["text"], whole["id"], response.headers["X-Request-Id"]

        for _ in range(2):
            got = await asyncio.gather(*(ask(prompt) for prompt in prompts))
            assert [text for text, _, _ in got] == alone
            assert len({id for _, id, _ in got}) == 2
            assert {echoed for _, _, echoed in got} == {"same"}
            body = {"model": MODEL, "prompt": prompts[0], "max_tokens": 200, "stream": True, "ignore_eos": True}
            async with http.post(mesh.url + TEXT, json=body) as response:
                await response.content.readline()  # and away
                response.close()
    assert await mesh.settled() == {}


@pytest.mark.parametrize("sent", HOSTILE_IDS)
async def test_a14_a_hostile_request_id_is_never_echoed(mesh: Mesh, sent: str) -> None:
    head = f"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: {sent}\r\n\r\n"
    status, headers, _ = await raw(port(mesh), head.encode("latin-1"))
    assert status == 200
    assert re.fullmatch(r"[0-9a-f]{32}", headers["x-request-id"])


async def test_a14_broken_bytes_get_an_envelope_and_no_traceback(mesh: Mesh) -> None:
    logged = len(mesh.log.read_bytes())
    for name, (data, status) in BROKEN.items():
        assert_raw_envelope(await raw(port(mesh), data), status), name
    for header in ("Traceparent", "Baggage", "Authorization", "Accept"):
        data = f"GET /metrics HTTP/1.1\r\nHost: x\r\n{header}: ".encode() + b"\xff\xfe;=,\r\n\r\n"
        assert (await raw(port(mesh), data))[0] == 200
    assert (await mesh.ask([5] * 8)).status == 200
    assert "Traceback" not in mesh.log.read_bytes()[logged:].decode()


async def test_every_path_and_method_has_an_id_and_its_error_the_envelope(mesh: Mesh) -> None:
    for path in (*mesh.get("/openapi.json")["paths"], "/", "/nowhere", "/v1/models/x/y", "/v1/../cluster"):
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
            request = f"{method} {path.replace('{', '%7B')} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            got = await raw(port(mesh), request.encode())
            assert got[1]["x-request-id"], (method, path)
            assert got[0] < 500, (method, path, got)
            if got[0] >= 400 and method != "HEAD":
                assert_raw_envelope(got, (404, 405, 415))


async def test_tokens_of_a_prompt_are_those_that_it_is_charged_for(mesh: Mesh) -> None:
    async with mesh.session() as http:
        for path, base in BODIES.items():
            name = "prompt" if path == TEXT else "messages"
            async with http.post(mesh.url + "/tokenize", json={name: base[name]}) as response:
                counted = await response.json()
            async with http.post(mesh.url + path, json=base | {"max_tokens": 1}) as response:
                assert (await response.json())["usage"]["prompt_tokens"] == counted["count"]
            async with http.post(mesh.url + "/detokenize", json={"tokens": counted["tokens"]}) as response:
                text = (await response.json())["prompt"]
            assert ("hello" if path == CHAT else "x") in text
            assert counted["max_model_len"] == mesh.get("/v1/models")["data"][0]["max_model_len"]


async def test_a_conversation_with_system_tools_and_parts_is_answered(mesh: Mesh) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "weather?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    for stream in (False, True):
        got = await mesh.ask(messages, path=CHAT, max_tokens=4, stream=stream)
        assert got.status == 200, got.error
        assert got.usage["completion_tokens"] >= 1


async def test_the_description_is_of_this_mesh_and_its_answers_keep_to_it(mesh: Mesh) -> None:
    described = mesh.get("/openapi.json")
    assert described["components"]["schemas"]["ChatBody"]["properties"]["model"]["enum"] == [MODEL]

    def check(name: str, value: Any) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": described["components"]}
        jsonschema.Draft202012Validator(schema).validate(value)

    for path, name in (("/v1/models", "ModelList"), (f"/v1/models/{MODEL}", "Model"), ("/version", "Version")):
        check(name, mesh.get(path))
    for path, name in (("/ready", "Ready"), ("/health", "Health"), ("/cluster", "Cluster")):
        check(name, mesh.get(path))
    more = {TEXT: {"logprobs": 2, "n": 2}, CHAT: {"logprobs": True, "top_logprobs": 2, "n": 2}}
    async with mesh.session() as http:
        for path, whole, chunk in ((CHAT, "ChatCompletion", "ChatChunk"), (TEXT, "TextCompletion", "TextChunk")):
            body = BODIES[path] | more[path] | {"max_tokens": 3}
            async with http.post(mesh.url + path, json=body) as response:
                check(whole, await response.json())
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            async with http.post(mesh.url + path, json=body) as response:
                events = (await response.text()).split("\n\n")
            for event in events[:-2]:
                check(chunk, json.loads(event.removeprefix("data: ")))
