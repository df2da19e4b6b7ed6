"""ACCEPTANCE A5, A7, A14: HTTP's own rules, on every path, for clients of any manners."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import re
from collections.abc import AsyncIterator

import pytest

from services.conductor.gateway.gateway import GatewayOptions
from services.conductor.gateway.http import Deadlines
from shared.errors import Contended
from tests.gateway.fakes import CHAT, MODEL, Api, FakeDispatcher, Script, StartApi, assert_envelope

POSTS = ("/v1/chat/completions", "/v1/completions")
GETS = ("/v1/models", "/v1/models/x", "/cluster", "/health", "/ready", "/metrics")


async def raw(api: Api, data: bytes, more: float = 30.0) -> tuple[int, dict[str, str], bytes]:
    """Send bytes as they are; status, headers (lower case) and body of the first answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", api.server.port)
    try:
        writer.write(data)
        async with asyncio.timeout(more):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lines = head.split("\r\n")
            headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:] if line)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
        return int(lines[0].split()[1]), headers, body
    finally:
        writer.close()


def assert_raw_envelope(answer: tuple[int, dict[str, str], bytes], status: int) -> dict[str, object]:
    assert answer[0] == status, answer
    assert re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", answer[1]["x-request-id"])
    error: dict[str, object] = json.loads(answer[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/chat", "/v1/models/", "/favicon.ico", "/v1/../etc/passwd", "/v1/%0a"]
)
async def test_an_unknown_route_is_404_in_the_envelope(api: Api, path: str) -> None:
    answer = await raw(api, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert_raw_envelope(answer, 404)


@pytest.mark.parametrize("path", POSTS + GETS)
async def test_a_wrong_method_is_405_and_names_the_right_one(api: Api, path: str) -> None:
    for method in ("PUT", "DELETE", "PATCH", "GET" if path in POSTS else "POST"):
        async with api.http.request(method, api.server.url + path) as response:
            assert response.status == 405
            assert assert_envelope(await response.json(), response.headers)["code"] == "method_not_allowed"
            assert response.headers["Allow"].startswith("POST" if path in POSTS else "GET")


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_a_wrong_content_type_is_415(api: Api, path: str, kind: str) -> None:
    async with api.http.post(api.server.url + path, data=b"{}", headers={"Content-Type": kind}) as response:
        assert response.status == 415
        assert_envelope(await response.json(), response.headers)


async def test_json_with_a_charset_is_json(api: Api) -> None:
    kind = {"Content-Type": "application/json; charset=utf-8"}
    async with api.http.post(api.server.url + POSTS[0], data=json.dumps(CHAT), headers=kind) as response:
        assert response.status == 200


async def chunks(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b" " * 65536


async def test_a_body_over_the_limit_is_413_told_or_not(start: StartApi) -> None:
    api = await start(options=GatewayOptions(model=MODEL, max_body_bytes=2**20))
    kind = {"Content-Type": "application/json"}
    for data in (io.BytesIO(b" " * (50 * 2**20)), chunks(40)):
        async with api.http.post(api.server.url + POSTS[0], data=data, headers=kind) as response:
            assert response.status == 413
            assert "1048576" in assert_envelope(await response.json(), response.headers)["message"]
    assert (await api.chat())[0] == 200


async def test_a_prompt_of_200_000_tokens_works(start: StartApi) -> None:
    api = await start(dispatcher=FakeDispatcher(Script([2], finish="stop"), context=300_000))
    status, answer, _ = await api.complete(prompt=[5] * 200_000)
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 200_000)
    status, answer, _ = await api.complete(prompt="fox " * 100_000)
    assert status == 200
    assert answer["usage"]["prompt_tokens"] >= 100_000
    assert len(api.dispatcher.asked[0].keys) == 16 * (200_000 // 16)


async def test_a_gzipped_body_is_read_and_a_bomb_is_not(start: StartApi) -> None:
    api = await start(options=GatewayOptions(model=MODEL, max_body_bytes=2**16))
    kind = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    for data, status in (
        (gzip.compress(json.dumps(CHAT).encode()), 200),
        (gzip.compress(b" " * 2**24), 413),
        (b"this is not gzip", 400),
    ):
        async with api.http.post(api.server.url + POSTS[0], data=data, headers=kind) as response:
            assert response.status == status, await response.text()
            await response.read()


@pytest.mark.parametrize("sent", ["abc", "req_1:2.3-4", "0f8fad5b-d9cb-469f-a165-70867728950e", "x" * 128])
async def test_a_sane_request_id_is_echoed(api: Api, sent: str) -> None:
    for path in ("/health", "/nowhere", "/v1/models"):
        async with api.http.get(api.server.url + path, headers={"X-Request-Id": sent}) as response:
            assert response.headers["X-Request-Id"] == sent
    async with api.http.post(
        api.server.url + POSTS[0], json=CHAT | {"stream": True}, headers={"X-Request-Id": sent}
    ) as response:
        assert response.headers["X-Request-Id"] == sent


@pytest.mark.parametrize("sent", ["", "x" * 129, "../../etc", "a b", "<script>", "ü", "a\tb", "%0d%0a"])
async def test_a_strange_request_id_is_replaced(api: Api, sent: str) -> None:
    head = f"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: {sent}\r\n\r\n"
    status, headers, _ = await raw(api, head.encode("latin-1"))
    assert status == 200
    assert re.fullmatch(r"[0-9a-f]{32}", headers["x-request-id"])


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS hello
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Big: " + b"a" * 10_240 + b"\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\nb: c\x00\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n: empty\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: a\r\n" % i for i in range(1000)) + b"\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
async def test_what_is_no_http_gets_400_in_the_envelope(api: Api, data: bytes) -> None:
    assert_raw_envelope(await raw(api, data), 400)
    assert (await api.chat())[0] == 200


async def test_expect_100_is_answered_and_others_refused(api: Api) -> None:
    body = json.dumps(CHAT).encode()
    head = f"POST {POSTS[0]} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", api.server.port)
    writer.write((head + "Expect: 100-continue\r\n\r\n").encode())
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
    assert_raw_envelope(await raw(api, (head + "Expect: miracles\r\n\r\n").encode() + body), 417)


async def test_a_head_that_does_not_come_is_408(start: StartApi) -> None:
    api = await start(deadlines=Deadlines(head=0.1, body=5, stall=5, idle=5))
    answer = await raw(api, b"GET /health HTTP/1.1\r\nHos")
    assert_raw_envelope(answer, 408)
    assert (await api.chat())[0] == 200


async def test_a_second_head_that_does_not_come_is_408_too(start: StartApi) -> None:
    api = await start(deadlines=Deadlines(head=0.1, body=5, stall=5, idle=5))
    reader, writer = await asyncio.open_connection("127.0.0.1", api.server.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"}")
    writer.write(b"GET /hea")
    assert b" 408 " in await reader.readline()
    writer.close()


async def test_a_body_that_does_not_come_is_408(start: StartApi) -> None:
    api = await start(options=GatewayOptions(model=MODEL, body_timeout=0.1))
    head = f"POST {POSTS[0]} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{{"
    assert_raw_envelope(await raw(api, head.encode()), 408)


async def test_a_silent_connection_is_closed(start: StartApi) -> None:
    api = await start(deadlines=Deadlines(head=5, body=5, stall=5, idle=0.1))
    reader, writer = await asyncio.open_connection("127.0.0.1", api.server.port)
    async with asyncio.timeout(30):
        assert await reader.read() == b""
    writer.close()


async def test_errors_of_the_mesh_have_their_status_and_headers(start: StartApi) -> None:
    api = await start()
    api.dispatcher.refuse = Contended("busy", field="ttft", retry_after_ms=1500)
    status, answer, headers = await api.chat()
    assert status == 429
    assert (headers["Retry-After"], headers["Retry-After-Ms"]) == ("2", "1500")
    error = assert_envelope(answer, headers)
    assert (error["code"], error["param"]) == ("contended", None)


async def test_health_metrics_and_head_requests(api: Api) -> None:
    await api.chat()
    async with api.http.get(api.server.url + "/metrics") as response:
        assert response.status == 200
        text = await response.text()
    assert 'mooncake_gateway_requests_total{outcome="ok",route="chat_completions"}' in text
    assert "mooncake_gateway_ttft_seconds_bucket" in text
    async with api.http.head(api.server.url + "/health") as response:
        assert response.status == 200


async def test_unknown_names_never_become_labels(api: Api) -> None:
    await api.chat(model="surprise-model")
    async with api.http.get(api.server.url + "/surprise-path") as response:
        assert response.status == 404
    async with api.http.get(api.server.url + "/metrics") as response:
        assert "surprise" not in await response.text()
