"""ACCEPTANCE A13, B1, B8: clients that go away, answers that break off, readers that are slow."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from typing import Any

import aiohttp
import pytest

from services.conductor.gateway.http import Deadlines
from services.conductor.gateway.options import GatewayOptions
from shared.errors import (
    AttemptFailed,
    BusDown,
    Contended,
    ContextLengthExceeded,
    DeadlineExceeded,
    DoesNotFit,
    MooncakeError,
    Refused,
    Unavailable,
)
from tests.gateway.fakes import CHAT, MODEL, Api, FakeDispatcher, Script, StartApi, assert_envelope, until
from tests.held import held_now

KINDS = ("gateway_requests", "gateway_generations", "tokenize_jobs")

FAULTS: list[tuple[Exception, int, str]] = [
    (Contended("full", retry_after_ms=2500), 429, "contended"),
    (Unavailable("nobody"), 503, "unavailable"),
    (BusDown("lost"), 503, "bus_down"),
    (Refused("choose again"), 503, "refused"),
    (DoesNotFit("larger than the pool"), 400, "does_not_fit"),
    (ContextLengthExceeded("too long"), 400, "context_length_exceeded"),
    (DeadlineExceeded("late"), 504, "deadline_exceeded"),
    (AttemptFailed("five times"), 502, "attempt_failed"),
    (MooncakeError("bug"), 500, "internal"),
    (RuntimeError("secret detail"), 500, "internal"),
]


def at_rest(api: Api) -> bool:
    held = held_now()
    return api.dispatcher.open == 0 and api.gateway.in_flight == 0 and not any(held.get(kind) for kind in KINDS)


@pytest.mark.parametrize(("error", "status", "code"), FAULTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_token_has_its_status(
    api: Api, error: Exception, status: int, code: str, stream: bool
) -> None:
    api.dispatcher.script = Script([], error=error)
    got, answer, headers = await api.chat(stream=stream)
    assert got == status
    shown = assert_envelope(answer, headers)
    assert shown["code"] == code
    assert "secret" not in shown["message"]
    assert ("Retry-After" in headers) == (status in (429, 503))
    assert at_rest(api)


@pytest.mark.parametrize(("error", "status", "code"), FAULTS)
async def test_an_error_behind_the_first_token_is_an_event_and_no_done(
    api: Api, error: Exception, status: int, code: str
) -> None:
    api.dispatcher.script = Script(api.ids("Par"), error=error, delay=0.001)
    async with api.http.post(api.server.url + "/v1/chat/completions", json=CHAT | {"stream": True}) as response:
        assert response.status == 200
        events = (await response.text()).split("\n\n")[:-1]
    assert "[DONE]" not in events[-1]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == code
    assert sum("[DONE]" in event for event in events) == 0
    await until(lambda: at_rest(api))


async def test_the_connection_of_a_broken_stream_is_closed(api: Api) -> None:
    api.dispatcher.script = Script(api.ids("Par"), error=AttemptFailed("gone"))
    body = json.dumps(CHAT | {"stream": True})
    reader, writer = await asyncio.open_connection("127.0.0.1", api.server.port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        + f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    async with asyncio.timeout(100):
        assert b"attempt_failed" in await reader.read()
    writer.close()


async def test_an_answer_without_a_finish_is_an_error_and_not_a_clean_end(api: Api) -> None:
    api.dispatcher.script = Script(api.ids("Par"), finish="")
    status, answer, _ = await api.chat()
    assert (status, answer["error"]["code"]) == (502, "attempt_failed")
    events = await api.chat_events()
    assert "attempt_failed" in events[-1]


async def test_an_engine_error_is_not_an_answer(api: Api) -> None:
    api.dispatcher.script = Script(api.ids("Par"), finish="error")
    assert (await api.chat())[0] == 502


async def test_one_failed_choice_fails_the_request_and_frees_the_others(api: Api) -> None:
    scripts = {4: Script(api.ids("a"), endless=True, delay=0.001), 5: Script([], error=AttemptFailed("gone"))}
    api.dispatcher.scripts = lambda generation: scripts[int(generation.tokens[0])]
    status, answer, _ = await api.complete(prompt=[[4], [5], [4]], max_tokens=400)
    assert (status, answer["error"]["code"]) == (502, "attempt_failed")
    await until(lambda: at_rest(api))


async def send(api: Api, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", api.server.port)
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("abort", [False, True])
async def test_a_client_that_leaves_cancels_its_generation(api: Api, stream: bool, abort: bool) -> None:
    """Before its first token, and in the middle; by a clean close and by a reset."""
    for script in (Script([4], delay=60), Script(api.ids("word "), endless=True, delay=0.002)):
        api.dispatcher.script = script
        _, writer = await send(api, CHAT | {"stream": stream, "max_tokens": 400})
        await until(lambda: api.dispatcher.open == 1)
        if abort:
            writer.transport.abort()
        else:
            writer.close()
        await until(lambda: at_rest(api))
    assert api.dispatcher.closed == 2


AHEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 2000
LARGE = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n" + b"x" * 4_000_000


@pytest.mark.parametrize(("ahead", "abort"), [(AHEAD, False), (AHEAD, True), (LARGE, True)])
async def test_a_client_that_leaves_is_noticed_behind_what_it_sent_ahead(api: Api, ahead: bytes, abort: bool) -> None:
    """More than is read while an answer is in the making, so that the loop does not see the end of it."""
    api.dispatcher.script = Script([4], delay=60)
    _, writer = await send(api, CHAT)
    writer.write(ahead)
    await until(lambda: api.dispatcher.open == 1)
    if abort:  # with a reset: the kernel would tell of the end only behind all that was sent
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    else:
        writer.close()
    await until(lambda: at_rest(api))
    assert api.dispatcher.closed == 1


async def test_a_client_that_sends_ahead_and_stays_gets_every_answer(api: Api) -> None:
    api.dispatcher.script = Script([4], delay=1.2)
    reader, writer = await send(api, CHAT)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 499)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    async with asyncio.timeout(100):
        assert (await reader.read()).count(b"HTTP/1.1 200 OK") == 501
    writer.close()


async def test_a_hundred_clients_leave_at_any_time_and_nothing_is_held(api: Api) -> None:
    api.dispatcher.script = Script(api.ids("word "), endless=True, delay=0.001)
    dice = random.Random(3)

    async def visit() -> None:
        _, writer = await send(api, CHAT | {"stream": dice.random() < 0.5, "max_tokens": 400})
        await asyncio.sleep(dice.random() * 0.05)
        writer.transport.abort()

    await asyncio.gather(*(visit() for _ in range(100)))
    await until(lambda: at_rest(api))
    api.says("fine")
    assert (await api.chat())[0] == 200


async def test_the_same_request_id_twice_at_once_and_after_a_cancel(api: Api) -> None:
    def script(generation: Any) -> Script:
        return Script([int(generation.tokens[0])] * 5, delay=0.002)

    api.dispatcher.scripts = script
    headers = {"X-Request-Id": "same"}

    async def ask(token: int) -> str:
        body = {"model": MODEL, "prompt": [token]}
        async with api.http.post(api.server.url + "/v1/completions", json=body, headers=headers) as response:
            assert response.headers["X-Request-Id"] == "same"
            return str((await response.json())["choices"][0]["text"])

    letters = {i: api.tokenizer.detokenizer(api.tokenizer.text("x")).feed(i) for i in range(40, 60)}
    answers = await asyncio.gather(*(ask(i) for i in letters))
    assert answers == [letter * 5 for letter in letters.values()]
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(ask(45), 0.004)
    assert await ask(46) == letters[46] * 5
    ids = [generation.id for generation in api.dispatcher.asked]
    assert len(set(ids)) == len(ids)
    assert "same" not in "".join(ids)


async def test_a_slow_reader_holds_the_dispatcher_back(start: StartApi) -> None:
    """What is not read waits at its source: the gateway keeps a bounded part of it."""
    api = await start(dispatcher=FakeDispatcher(Script([5], endless=True), context=10**6))
    _, writer = await send(api, CHAT | {"stream": True, "max_tokens": 500_000})
    seen: list[int] = []

    def settled() -> bool:
        seen.append(api.dispatcher.produced)
        return len(seen) > 40 and seen[-1] == seen[-40] > 0

    await until(settled)
    assert api.dispatcher.produced < 200_000
    writer.transport.abort()
    await until(lambda: at_rest(api))


async def test_a_reader_that_never_reads_is_cut_off(start: StartApi) -> None:
    api = await start(
        dispatcher=FakeDispatcher(Script([5], endless=True), context=10**6),
        deadlines=Deadlines(head=5, body=5, stall=0.2, idle=5),
    )
    _, writer = await send(api, CHAT | {"stream": True, "max_tokens": 500_000})
    await until(lambda: api.dispatcher.open == 1)
    await until(lambda: at_rest(api))
    writer.transport.abort()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_has_a_deadline(start: StartApi, stream: bool) -> None:
    api = await start(options=GatewayOptions(model=MODEL, request_timeout=0.1))
    api.dispatcher.script = Script([4], delay=60)
    status, answer, _ = await api.chat(stream=stream)
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    api.dispatcher.script = Script(api.ids("a"), endless=True, delay=0.01)
    if stream:
        assert "deadline_exceeded" in (await api.chat_events(max_tokens=400))[-1]
    await until(lambda: at_rest(api))


async def test_hundreds_of_streams_at_once(start: StartApi) -> None:
    api = await start()
    gate = asyncio.Event()
    api.dispatcher.script = Script(api.ids("word ") * 2, gate=gate)

    async def one(http: aiohttp.ClientSession) -> int:
        async with http.post(api.server.url + "/v1/chat/completions", json=CHAT | {"stream": True}) as response:
            return (await response.read()).count(b"[DONE]")

    streams = [asyncio.create_task(one(api.http)) for _ in range(300)]
    await until(lambda: api.gateway.in_flight == 300)
    gate.set()
    assert sum(await asyncio.gather(*streams)) == 300
    await until(lambda: at_rest(api))
