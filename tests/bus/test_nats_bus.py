"""NatsBus against a real nats-server, killed, stopped and restarted on the same port."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import nats
import pytest
from nats.aio.msg import Msg
from opentelemetry import context, trace
from opentelemetry.sdk.trace import TracerProvider

from shared.embedded import NatsServer
from shared.errors import BusDown, DeadlineExceeded, InvalidInput, NoResponders, NoRoom, ProtocolError
from shared.messages import (
    Accepted,
    Admission,
    AnyMessage,
    Cancel,
    LiveList,
    LiveReply,
    Load,
    Output,
    Ref,
    RefusedReply,
    Sampling,
    Since,
    SinceReply,
    Submit,
)
from shared.nats_bus import NatsBus

A, B = Ref("a", 1), Ref("b", 2)


def cancel(n: int = 1, reason: str = "") -> Cancel:
    return Cancel(sender=A, target=B, request="r", attempt=n, reason=reason)


def accepted(message: Cancel | Submit | Since) -> Accepted:
    return Accepted(sender=B, target=A, request=message.request, attempt=message.attempt)


async def accept(message: AnyMessage) -> AnyMessage | None:
    assert isinstance(message, Cancel | Submit | Since)
    return accepted(message)


async def until(holds: Callable[[], bool], timeout: float = 100.0) -> None:
    async with asyncio.timeout(timeout):
        while not holds():
            await asyncio.sleep(0.01)


Pair = tuple[NatsBus, NatsBus]


@pytest.fixture
async def pair(nats_server: NatsServer) -> AsyncIterator[Pair]:
    async with (
        await NatsBus.connect(nats_server.url, "m", name="a") as a,
        await NatsBus.connect(nats_server.url, "m", name="b") as b,
    ):
        yield a, b


async def test_request_reply_and_refusals(pair: Pair) -> None:
    a, b = pair

    async def handle(message: AnyMessage) -> AnyMessage | None:
        assert isinstance(message, Cancel)
        if message.reason == "refuse":
            raise NoRoom("full", retry_after_ms=7)
        if message.reason == "bug":
            raise KeyError("oops")
        return accepted(message)

    await b.serve("b", handle)
    assert await a.request("b", cancel(3), 60) == accepted(cancel(3))
    refused = await a.request("b", cancel(4, "refuse"), 60)
    assert isinstance(refused, RefusedReply)
    assert (refused.error.code, refused.error.retry_after_ms, refused.attempt) == ("no_room", 7, 4)
    bug = await a.request("b", cancel(5, "bug"), 60)
    assert isinstance(bug, RefusedReply) and bug.error.code == "internal"


async def test_nobody_there_and_nobody_answers(pair: Pair) -> None:
    a, b = pair

    async def silent(message: AnyMessage) -> None:
        return None

    with pytest.raises(NoResponders):
        await a.request("nobody", cancel(), 60)
    await b.serve("silent", silent)
    with pytest.raises(DeadlineExceeded):
        await a.request("silent", cancel(), 0.05)
    assert not a._waiting


async def test_messages_start_in_order_and_overlap(pair: Pair) -> None:
    a, b = pair
    started: list[int] = []
    go = asyncio.Event()

    async def handle(message: AnyMessage) -> None:
        assert isinstance(message, Cancel)
        started.append(message.attempt)
        await go.wait()

    await b.serve("ordered", handle)
    for n in range(200):
        await a.send("ordered", cancel(n))
    await until(lambda: len(started) == 200)
    assert started == list(range(200))
    go.set()


def big_submit(tokens: int, block: int = 32) -> Submit:
    admission = Admission(
        gateway=A,
        tokens=bytes(range(256)) * (tokens * 4 // 256),
        prompt_tokens=tokens,
        root=b"r" * 16,
        keys=b"k" * (tokens // block * 16),
        sampling=Sampling(max_tokens=1, seed=1),
        lists=0,
    )
    return Submit(sender=A, target=B, request="big", attempt=1, admission=admission, decode=B)


async def test_payload_above_the_limit_both_ways_and_in_order(pair: Pair) -> None:
    a, b = pair
    seen: list[str] = []
    submit = big_submit(640_000)  # 2.9 MB against a limit of 1 MB

    async def handle(message: AnyMessage) -> AnyMessage | None:
        seen.append(type(message).__name__)
        if isinstance(message, Submit):
            assert message == submit
            return accepted(message)
        assert isinstance(message, Since)
        outputs = [Output(index, 12345, "", 0, -1.5) for index in range(200_000)]
        return SinceReply(sender=B, target=A, request="r", attempt=1, index=0, outputs=outputs)

    await b.serve("big", handle)
    answer, _ = await asyncio.gather(a.request("big", submit, 10), a.send("big", submit))
    assert isinstance(answer, Accepted)
    reply = await a.request("big", Since(sender=A, target=B, request="r", attempt=1, index=0), 20)
    assert isinstance(reply, SinceReply) and len(reply.outputs) == 200_000
    with pytest.raises(NoResponders):
        await a.request("nobody", submit, 60)
    assert len(b._parts) == 0 and len(a._parts) == 0


async def test_a_small_message_does_not_overtake_the_large_one_sent_before(pair: Pair) -> None:
    a, b = pair
    seen: list[str] = []

    async def handle(message: AnyMessage) -> None:
        seen.append(type(message).__name__)

    await b.serve("order", handle)
    await a.send("order", big_submit(640_000))
    await a.send("order", cancel())
    await until(lambda: len(seen) == 2)
    assert seen == ["Submit", "Cancel"]


async def test_garbage_and_other_protocol_versions(nats_server: NatsServer, pair: Pair) -> None:
    a, b = pair
    await b.serve("robust", accept)
    raw = await nats.connect(nats_server.url)
    for payload in (b"", b"\xffMCP", b"\xffMCP" + bytes(100), b"\x02future", b"\x01\xc1", b"\x01\x81"):
        await raw.publish("mc.m.i.robust", payload)
    answer = await raw.request("mc.m.i.robust", b"\x09", timeout=60)
    assert answer.headers and "protocol 9" in answer.headers["Mc-Error"]
    assert await a.request("robust", cancel(), 60) == accepted(cancel())

    async def liar(msg: Msg) -> None:
        await msg.respond(b"\x63no message")

    await raw.subscribe("mc.m.i.liar", cb=liar)
    await raw.flush()
    with pytest.raises(ProtocolError, match="protocol 99"):
        await a.request("liar", cancel(), 60)
    await raw.close()


async def test_ids_that_would_be_wildcards_are_refused(pair: Pair) -> None:
    for id in ("", "*", ">", "a.b", "a b", "x\r\n"):
        with pytest.raises(InvalidInput):
            await pair[0].send(id, cancel())


async def test_meshes_do_not_hear_each_other(nats_server: NatsServer, pair: Pair) -> None:
    await pair[1].serve("same", accept)
    async with await NatsBus.connect(nats_server.url, "other", name="c") as other:
        with pytest.raises(NoResponders):
            await other.request("same", cancel(), 60)


async def test_a_failing_list_handler_is_logged_not_answered(pair: Pair) -> None:
    a, b = pair

    async def handle(message: AnyMessage) -> AnyMessage | None:
        assert isinstance(message, LiveList)
        if message.number == 1:
            raise NoRoom("no")
        return LiveReply(sender=B, target=A, number=message.number, unknown=[], load=Load())

    await b.serve("lists", handle)
    with pytest.raises(DeadlineExceeded):
        await a.request("lists", LiveList(sender=A, target=B, number=1, attempts=[]), 0.05)
    assert isinstance(await a.request("lists", LiveList(sender=A, target=B, number=2, attempts=[]), 60), LiveReply)


async def test_trace_context_reaches_the_handler(pair: Pair) -> None:
    a, b = pair
    seen: list[trace.SpanContext] = []

    async def handle(message: AnyMessage) -> AnyMessage | None:
        seen.append(trace.get_current_span().get_span_context())
        return await accept(message)

    await b.serve("traced", handle)
    await a.request("traced", cancel(), 60)
    with TracerProvider().get_tracer("test").start_as_current_span("parent") as span:
        await a.request("traced", cancel(), 60)
        await a.request("traced", big_submit(640_000), 60)
    assert not seen[0].is_valid
    assert {found.trace_id for found in seen[1:]} == {span.get_span_context().trace_id}
    assert not trace.get_current_span(context.get_current()).get_span_context().is_valid


async def test_no_server_within_the_deadline() -> None:
    with pytest.raises(BusDown, match="no NATS at"):
        await NatsBus.connect("nats://user:secret@127.0.0.1:1", "m", name="x", timeout=0.2)


async def started(server: NatsServer) -> None:
    await asyncio.to_thread(server.wait_ready)


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_server_lost_and_back_on_the_same_port(how: str) -> None:
    with NatsServer() as server:
        async with (
            await NatsBus.connect(server.url, "m", name="a") as a,
            await NatsBus.connect(server.url, "m", name="b") as b,
        ):
            changes: list[bool] = []
            a.on_change(changes.append)
            stuck = asyncio.Event()

            async def handle(message: AnyMessage) -> AnyMessage | None:
                assert isinstance(message, Cancel)
                if message.reason == "wait":
                    stuck.set()
                    await asyncio.Event().wait()
                return accepted(message)

            await b.serve("b", handle)
            waiting = asyncio.create_task(a.request("b", cancel(1, "wait"), 60))
            await stuck.wait()
            server.kill() if how == "kill" else server.signal(signal.SIGSTOP)
            with pytest.raises(BusDown):
                await asyncio.wait_for(waiting, 100)
            assert not a.connected and changes == [False]
            with pytest.raises(BusDown):
                await a.send("b", cancel())
            with pytest.raises(BusDown):
                await a.request("b", cancel(), 60)
            await b.serve("late", accept)
            if how == "kill":
                server.spawn()
                await started(server)
            else:
                server.signal(signal.SIGCONT)
            await until(lambda: a.connected and b.connected)
            assert changes == [False, True]
            assert await a.request("b", cancel(), 60) == accepted(cancel())
            assert await a.request("late", cancel(), 60) == accepted(cancel())


async def test_connecting_in_the_background() -> None:
    server = NatsServer()
    server.start()
    server.kill()
    async with await NatsBus.connect(server.url, "m", name="a", timeout=0) as a:
        await a.serve("a", accept)
        assert not a.connected
        server.spawn()
        await until(lambda: a.connected)
        assert await a.request("a", cancel(), 60) == accepted(cancel())
    server.stop()


async def test_close_lets_handlers_answer(nats_server: NatsServer, pair: Pair) -> None:
    a, _ = pair
    c = await NatsBus.connect(nats_server.url, "m", name="c")
    entered = asyncio.Event()

    async def slow(message: AnyMessage) -> AnyMessage | None:
        entered.set()
        await asyncio.sleep(0.05)
        return await accept(message)

    await c.serve("closing", slow)
    asked = asyncio.create_task(a.request("closing", cancel(), 60))
    await entered.wait()
    await c.close()
    assert await asked == accepted(cancel())
    await c.close()
    with pytest.raises(BusDown):
        await c.send("a", cancel())
    with pytest.raises(NoResponders):
        await a.request("closing", cancel(), 60)


Answer = Callable[[AnyMessage], Awaitable[AnyMessage | None]]


async def test_what_is_written_faster_than_it_is_taken_is_refused_not_buffered() -> None:
    with NatsServer() as server:
        async with await NatsBus.connect(server.url, "m", name="a") as a:
            server.signal(signal.SIGSTOP)
            with pytest.raises(BusDown):
                for _ in range(100):
                    await a.send("x", big_submit(640_000))
                    if a._link is not None:
                        assert a._link.client.pending_data_size < 80 << 20
            server.signal(signal.SIGCONT)
