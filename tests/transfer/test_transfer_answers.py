"""Calls that are answered at once: the same answers and faults as later ones, and no more than the caller reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from services.store.transfer.control import Callee
from services.store.transfer.wire import Kind, Parser, pack, parse_fault
from shared.errors import Contended, InternalError, InvalidInput, MooncakeError
from shared.messages import Ref

PEER = Ref("peer", 1)


class Pipe(asyncio.Transport):
    """What is written is kept; it reads when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.parser = Parser()
        self.said: list[tuple[Kind, int, bytes]] = []
        self.reading = True

    def write(self, data: Any) -> None:
        self.said += [(header.kind, header.tag, body) for header, body in self.parser.feed(bytes(data))]

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def paused(self) -> bool:
        return not self.reading


async def reap(peer: Ref, streams: list[int]) -> None:
    return None


def callee(handler: Callable[[Ref, bytes], Awaitable[bytes] | bytes], most: int = 4) -> tuple[Callee, Pipe]:
    pipe, end = Pipe(), Callee(PEER, handler, reap, lambda _: None, most)
    end.connection_made(pipe)
    return end, pipe


def both(payload: bytes) -> bytes:
    if payload == b"wrong":
        raise InvalidInput("wrong", field="payload")
    if payload == b"bug":
        raise KeyError("bug")
    return payload.upper()


def at_once(peer: Ref, payload: bytes) -> bytes:
    return both(payload)


async def later(peer: Ref, payload: bytes) -> bytes:
    await asyncio.sleep(0)
    return both(payload)


@pytest.mark.parametrize("handler", [at_once, later])
async def test_answers_and_faults_are_the_same_at_once_and_later(handler: Any) -> None:
    end, pipe = callee(handler)
    calls = [b"yes", b"wrong", b"bug", b""]
    end.data_received(b"".join(pack(Kind.CALL, tag, payload) for tag, payload in enumerate(calls)))
    for _ in range(5):
        await asyncio.sleep(0)
    assert [(kind, tag) for kind, tag, _ in pipe.said] == [
        (Kind.ANSWER, 0), (Kind.FAULT, 1), (Kind.FAULT, 2), (Kind.ANSWER, 3),
    ]  # fmt: skip
    faults: list[MooncakeError] = [parse_fault(body) for kind, _, body in pipe.said if kind is Kind.FAULT]
    assert [type(fault) for fault in faults] == [InvalidInput, InternalError]
    assert (pipe.said[0][2], pipe.said[3][2]) == (b"YES", b"")


async def test_who_does_not_read_is_answered_when_it_does_and_asks_no_more_than_it_may() -> None:
    asked: list[bytes] = []

    def handler(peer: Ref, payload: bytes) -> bytes:
        asked.append(payload)
        return payload

    end, pipe = callee(handler, most=4)
    end.pause_writing()
    assert pipe.paused()
    end.data_received(b"".join(pack(Kind.CALL, tag, b"%d" % tag) for tag in range(6)))  # they had come before
    await asyncio.sleep(0)
    assert asked == [] and [(kind, tag) for kind, tag, _ in pipe.said] == [(Kind.FAULT, 4), (Kind.FAULT, 5)]
    assert isinstance(parse_fault(pipe.said[0][2]), Contended)
    pipe.said.clear()
    end.resume_writing()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not pipe.paused()
    assert [(kind, tag, body) for kind, tag, body in pipe.said] == [(Kind.ANSWER, tag, b"%d" % tag) for tag in range(4)]
    end.data_received(pack(Kind.CALL, 9, b"9"))
    assert pipe.said[-1] == (Kind.ANSWER, 9, b"9"), "at once"


async def test_an_answer_that_fills_the_pipe_again_holds_the_others_up() -> None:
    """However many wait, they are asked for one by one: what is written while there is no room is one answer."""
    end, pipe = callee(at_once, most=8)
    write = pipe.write

    def full(data: Any) -> None:
        write(data)
        end.pause_writing()

    pipe.write = full  # type: ignore[method-assign]
    end.pause_writing()
    end.data_received(b"".join(pack(Kind.CALL, tag, b"%d" % tag) for tag in range(6)))
    for answered in range(1, 7):
        end.resume_writing()
        for _ in range(10):
            await asyncio.sleep(0)
        assert pipe.paused() and [tag for _, tag, _ in pipe.said] == list(range(answered))
