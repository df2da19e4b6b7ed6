"""What agents say to each other about RDMA, as calls over their authenticated connection."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from services.store.transfer.rdma.queue_pair import Side
from services.store.transfer.topology.matrix import Document
from shared.errors import MALFORMED, ProtocolError

T = TypeVar("T")
MARK = b"\x00rdma\x01"
"""Begins each of these calls; no other call between agents begins with a zero byte."""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """-> Facts."""


class Facts(msgspec.Struct, frozen=True):
    """An agent's NICs by where they are: the topology matrix in the paper's form."""

    matrix: Document


class Keys(msgspec.Struct, frozen=True, tag="keys"):
    """-> Reach: how to READ, or WRITE, a segment."""

    segment: str
    write: bool
    timeout: float


class Connect(msgspec.Struct, frozen=True, tag="connect"):
    """-> Connected. ``number`` names the connection among all of the asking agent; ``nic`` is one of the asked one."""

    number: int
    nic: str
    side: Side


class Connected(msgspec.Struct, frozen=True):
    """``live``: the WRITE grants of the asking agent that are live here (``handshake``); None: grants mean nothing.
    ``opened`` tells this opening of the device from any other: keys of another one are worth nothing."""

    side: Side
    live: list[int] | None
    opened: int


class Reap(msgspec.Struct, frozen=True, tag="reap"):
    """-> None, when our ends of these connections are destroyed: nothing of them can land any more."""

    numbers: list[int]


class Admit(msgspec.Struct, frozen=True, tag="admit"):
    """-> list of (begin, end): what may be written by a grant; None: all of the segment."""

    segment: str
    grant: int


class Keep(msgspec.Struct, frozen=True, tag="keep"):
    """-> None. All connections that the asking agent has to this one; others can be destroyed."""

    numbers: list[int]


class Port(msgspec.Struct, frozen=True, tag="port"):
    """-> None. A port of the one that says this went up or down."""

    nic: str
    up: bool


Call = Ask | Keys | Connect | Reap | Admit | Keep | Port

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Call] = msgspec.msgpack.Decoder(Call)


def pack(call: Call) -> bytes:
    return MARK + _encoder.encode(call)


def is_ours(payload: bytes) -> bool:
    return payload.startswith(MARK)


def unpack(payload: bytes) -> Call:
    """Raises ProtocolError."""
    try:
        return _decoder.decode(memoryview(payload)[len(MARK) :])
    except MALFORMED as e:
        raise ProtocolError(f"not a call about RDMA: {e}") from e


def pack_answer(answer: Any) -> bytes:
    return _encoder.encode(answer)


def unpack_answer(payload: bytes, kind: type[T]) -> T:
    """Raises ProtocolError."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except MALFORMED as e:
        raise ProtocolError(f"not an answer about RDMA: {e}") from e
