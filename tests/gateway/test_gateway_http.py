"""ACCEPTANCE A5, A7, A14: HTTP's own rules, on every path, for clients of any manners."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import re
from collections.abc import AsyncIterator

import pytest

from services.conductor.gateway.http import Deadlines
from services.conductor.gateway.options import GatewayOptions
from shared.errors import Contended
from tests.gateway.fakes import CHAT, MODEL, Api, FakeDispatcher, Script, StartApi, assert_envelope
from tests.gateway.wire import BROKEN, HOSTILE_IDS, answer, assert_raw_envelope, raw

BOMB = gzip.compress(b" " * 2**24)
POSTS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/detokenize")
GETS = ("/v1/models", "/v1/models/x", "/version", "/cluster", "/openapi.json", "/health", "/ready", "/metrics")


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/chat", "/v1/models/", "/favicon.ico", "/v1/../etc/passwd", "/v1/%0a"]
)
async def test_an_unknown_route_is_404_in_the_envelope(api: Api, path: str) -> None:
    answer = await raw(api.server.port, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
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


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "GZIP", "x", "identity, gzip"])
async def test_a_compressed_body_is_415_and_never_unpacked(api: Api, coding: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}
    for path in POSTS:
        async with api.http.post(api.server.url + path, data=BOMB, headers=headers, compress=False) as response:
            assert response.status == 415
            assert response.headers["Accept-Encoding"] == "identity"
            assert_envelope(await response.json(), response.headers)


async def test_a_body_compressed_in_transfer_is_415(api: Api) -> None:
    head = "Host: x\r\nContent-Type: application/json\r\nTransfer-Encoding: gzip, chunked\r\n\r\n"
    piece = gzip.compress(json.dumps(CHAT).encode())
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(piece), piece)
    for path in POSTS:
        got = await raw(api.server.port, f"POST {path} HTTP/1.1\r\n{head}".encode() + body)
        assert "gzip" in str(assert_raw_envelope(got, 415)["message"])


async def test_a_body_of_50_mb_is_refused_unread(start: StartApi) -> None:
    """ACCEPTANCE A7. Where its length is told nothing of it is taken in; where not, what is over the limit is not."""
    api = await start(options=GatewayOptions(model=MODEL, max_body_bytes=2**20))
    for head, most in ((b"Content-Length: 52428800", 2**16), (b"Transfer-Encoding: chunked", 2**21)):
        reader, writer = await asyncio.open_connection("127.0.0.1", api.server.port, limit=2**16)
        begin = f"POST {POSTS[1]} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()
        writer.write(begin + head + b"\r\n\r\n")
        piece, sent = b"8000\r\n" + b" " * 0x8000 + b"\r\n", 0
        while not reader._buffer and sent < most:  # type: ignore[attr-defined]
            writer.write(piece if b"chunked" in head else b" " * 1024)
            sent += 0x8000 if b"chunked" in head else 1024
            await asyncio.sleep(0.001)
        async with asyncio.timeout(100):
            assert b" 413 " in await reader.readline()
        writer.close()
    assert (await api.chat())[0] == 200


@pytest.mark.parametrize("sent", ["abc", "req_1:2.3-4", "0f8fad5b-d9cb-469f-a165-70867728950e", "x" * 128])
async def test_a_sane_request_id_is_echoed(api: Api, sent: str) -> None:
    for path in ("/health", "/nowhere", "/v1/models"):
        async with api.http.get(api.server.url + path, headers={"X-Request-Id": sent}) as response:
            assert response.headers["X-Request-Id"] == sent
    async with api.http.post(
        api.server.url + POSTS[0], json=CHAT | {"stream": True}, headers={"X-Request-Id": sent}
    ) as response:
        assert response.headers["X-Request-Id"] == sent


@pytest.mark.parametrize("sent", HOSTILE_IDS)
async def test_a_strange_request_id_is_replaced(api: Api, sent: str) -> None:
    head = f"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: {sent}\r\n\r\n"
    status, headers, _ = await raw(api.server.port, head.encode("latin-1"))
    assert status == 200
    assert re.fullmatch(r"[0-9a-f]{32}", headers["x-request-id"])


@pytest.mark.parametrize(
    "header", ["Authorization", "Traceparent", "Tracestate", "Baggage", "Accept", "Cookie", "User-Agent"]
)
@pytest.mark.parametrize("value", [b"\xff\xfe\x80", b"a" * 10_240, b"../..", b"=;,=;", b"00-0-0-0", b'"\\', b"%00%0a"])
async def test_hostile_headers_harm_nothing(api: Api, header: str, value: bytes) -> None:
    body = json.dumps(CHAT).encode()
    head = f"POST {POSTS[0]} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    field = header.encode() + b": " + value + b"\r\n\r\n"
    assert (await raw(api.server.port, head.encode() + field + body))[0] == 200
    assert (await raw(api.server.port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n" + field))[0] == 200


@pytest.mark.parametrize(
    "kind", ['application/json; charset="', "application/json;;;", "a/b/c", "\xff", ";", "text/plain"]
)
async def test_a_hostile_content_type_is_415_or_json(api: Api, kind: str) -> None:
    head = f"POST {POSTS[1]} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: 2\r\n\r\n{{}}"
    assert_raw_envelope(await raw(api.server.port, head.encode("latin-1")), (400, 415))


@pytest.mark.parametrize("name", BROKEN)
async def test_what_is_no_http_gets_its_status_in_the_envelope(
    api: Api, name: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    data, status = BROKEN[name]
    reader, writer = await asyncio.open_connection("127.0.0.1", api.server.port)
    writer.write(data)
    async with asyncio.timeout(100):
        assert_raw_envelope(await answer(reader), status)
        assert await reader.read() == b""
    writer.close()
    assert (await api.chat())[0] == 200
    assert "Traceback" not in caplog.text + "".join(capfd.readouterr())


async def test_a_body_shorter_than_it_says_is_408_and_a_longer_one_is_another_request(start: StartApi) -> None:
    api = await start(options=GatewayOptions(model=MODEL, body_timeout=0.2))
    head = f"POST {POSTS[1]} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    assert_raw_envelope(await raw(api.server.port, f"{head}9\r\n\r\n{{}}".encode()), 408)
    assert_raw_envelope(await raw(api.server.port, f"{head}1\r\n\r\n{{}}{{}}".encode()), 400)


@pytest.mark.parametrize("path", [*POSTS, *GETS, "/nowhere", "*"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
async def test_every_method_on_every_path_has_an_id_and_errors_the_envelope(api: Api, path: str, method: str) -> None:
    got = await raw(api.server.port, f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    if got[0] >= 400 and method != "HEAD":
        assert_raw_envelope(got, (404, 405, 415) if path != "*" else (400, 404, 405))
    assert re.fullmatch(r"[0-9a-f]{32}", got[1]["x-request-id"])
    assert got[0] < 500
    if method in ("PUT", "DELETE", "PATCH", "TRACE") and path in (*POSTS, *GETS):
        assert got[0] == 405


@pytest.mark.parametrize(("path", "allowed"), [("/health", "GET, HEAD, OPTIONS"), (POSTS[0], "POST, OPTIONS")])
async def test_options_names_the_methods_and_allows_no_other_origin(api: Api, path: str, allowed: str) -> None:
    asked = {"Origin": "https://elsewhere.example", "Access-Control-Request-Method": "POST"}
    async with api.http.options(api.server.url + path, headers=asked) as response:
        assert (response.status, response.headers["Allow"]) == (204, allowed)
        assert not any(name.lower().startswith("access-control") for name in response.headers)
        assert await response.read() == b""
    assert (await raw(api.server.port, b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n"))[0] == 204


async def test_head_is_get_without_its_body(api: Api) -> None:
    for path in ("/health", "/v1/models", "/openapi.json"):
        async with api.http.get(api.server.url + path) as whole, api.http.head(api.server.url + path) as head:
            assert head.status == whole.status
            assert head.headers["Content-Length"] == whole.headers["Content-Length"]
            assert await head.read() == b""


@pytest.mark.parametrize("depth", [100, 1000, 100_000])
@pytest.mark.parametrize("field", ["tools", "metadata", "messages", "nonsense"])
async def test_deep_json_is_refused_and_nothing_falls_over(api: Api, depth: int, field: str) -> None:
    body = f'{{"model":"{MODEL}","{field}":' + "[" * depth + "]" * depth + "}"
    async with api.http.post(api.server.url + POSTS[0], data=body, headers={"Content-Type": "application/json"}) as got:
        assert got.status == 400
        assert_envelope(await got.json(), got.headers)


async def test_expect_100_is_answered_and_others_refused(api: Api) -> None:
    body = json.dumps(CHAT).encode()
    head = f"POST {POSTS[0]} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", api.server.port)
    writer.write((head + "Expect: 100-continue\r\n\r\n").encode())
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
    assert_raw_envelope(await raw(api.server.port, (head + "Expect: miracles\r\n\r\n").encode() + body), 417)


@pytest.mark.parametrize("keep", ["", "Connection: keep-alive\r\n"])
@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0_gets_one_answer_and_sees_its_end(api: Api, stream: bool, keep: str) -> None:
    """It knows neither chunks nor interim answers: a stream ends with its connection."""
    body = json.dumps(CHAT | {"stream": stream}).encode()
    head = f"POST {POSTS[0]} HTTP/1.0\r\nExpect: 100-continue\r\nContent-Type: application/json\r\n{keep}"
    reader, writer = await asyncio.open_connection("127.0.0.1", api.server.port)
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    async with asyncio.timeout(100):
        status, headers, _ = await answer(reader)
        assert (status, headers.get("transfer-encoding")) == (200, None)
        if stream:
            assert (await reader.read()).endswith(b"data: [DONE]\n\n")
    writer.close()


async def test_a_head_that_does_not_come_is_408(start: StartApi) -> None:
    api = await start(deadlines=Deadlines(head=0.1, body=5, stall=5, idle=5))
    answer = await raw(api.server.port, b"GET /health HTTP/1.1\r\nHos")
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
    assert_raw_envelope(await raw(api.server.port, head.encode()), 408)


async def test_a_silent_connection_is_closed(start: StartApi) -> None:
    api = await start(deadlines=Deadlines(head=5, body=5, stall=5, idle=0.1))
    reader, writer = await asyncio.open_connection("127.0.0.1", api.server.port)
    async with asyncio.timeout(100):
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
