"""What store agents ask each other over the transfer engine's calls: typed MessagePack after one version byte."""

from __future__ import annotations

from typing import Any

import msgspec

from services.store.landings import Span
from shared.blocks import Namespace
from shared.errors import MALFORMED, ProtocolError

VERSION = 2


class Lease(msgspec.Struct, frozen=True, omit_defaults=True, tag="lease"):
    """-> Leased. Layers [first_layer, last_layer) of the blocks ``keys`` of segment ``segment``. Where all of them that
    are there have at most ``carry`` bytes together, they come in the answer, and nothing is leased. ``over``: leases of
    the segment that the reader gives back, as by Release. ``trace``: W3C trace context, where the request is traced."""

    segment: str
    keys: bytes
    first_layer: int
    last_layer: int
    carry: int = 0
    over: list[int] = []
    trace: dict[str, str] = {}


class Descriptor(msgspec.Struct, frozen=True, array_like=True):
    """Where a leased block lies. ``generation`` is the READ's grant. ``checksum`` (xxh3 of the block's ``size`` valid
    bytes) is None where the owner computes none. ``offset`` and ``length`` are those of the layers asked for.
    ``parent`` is the key before, as the owner knows it; ``tenant`` the tag of whose quota it counts against there.
    ``data``: the bytes themselves, copied by the owner in the turn in which it found the block, so that there is no
    lease to keep and no generation to compare."""

    offset: int
    length: int
    generation: int
    checksum: int | None
    size: int
    parent: bytes = b""
    tenant: int = 0
    data: memoryview | None = None


class Leased(msgspec.Struct, frozen=True, array_like=True):
    """``id`` 0: nothing is leased; ``blocks`` has what came with the answer. ``ttl`` in seconds, for the reader,
    from before it asked."""

    id: int
    ttl: float
    blocks: list[Descriptor | None]


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """-> bool"""

    segment: str
    id: int


class Release(msgspec.Struct, frozen=True, tag="release"):
    """-> None. Leases that are over already are none."""

    segment: str
    ids: list[int]


class Landed(msgspec.Struct, frozen=True, omit_defaults=True, tag="landed"):
    """-> None. All completions of these spans are in (``all_completions``). Refused with Fenced. ``trace`` as in
    Lease."""

    segment: str
    token: int
    spans: list[Span]
    trace: dict[str, str] = {}


class Fence(msgspec.Struct, frozen=True, tag="fence"):
    """-> bool: has the writer dropped what was queued and seen all its completions? Writes nothing for it again."""

    token: int
    timeout: float


class Corrupt(msgspec.Struct, frozen=True, tag="corrupt"):
    """-> None. A reader found another checksum; the owner looks itself."""

    segment: str
    key: bytes
    generation: int


class Remove(msgspec.Struct, frozen=True, tag="remove"):
    """-> list[bool]"""

    segment: str
    keys: bytes


class Replicate(msgspec.Struct, frozen=True, tag="replicate"):
    """-> list[str]: for each key why it is not there now, "" where it is. ``sources``: agents that have them."""

    namespace: Namespace
    keys: bytes
    sources: list[str]
    timeout: float


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """-> list[bool]: was the copy dropped? Only where ``keep`` copies at others are left."""

    segment: str
    keys: bytes
    keep: int


AnyCall = Lease | Renew | Release | Landed | Fence | Corrupt | Remove | Replicate | Drop

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyCall] = msgspec.msgpack.Decoder(AnyCall)


def encode(value: Any) -> bytes:
    """A call or an answer."""
    out = bytearray((VERSION,))
    _encoder.encode_into(value, out, 1)
    return bytes(out)


def decode_call(payload: bytes) -> AnyCall:
    """Raises ProtocolError."""
    try:
        return _decoder.decode(_body(payload))
    except MALFORMED as e:
        raise ProtocolError(f"not a call between agents: {e}") from e


def decode_answer(payload: bytes, kind: Any) -> Any:
    """Raises ProtocolError."""
    try:
        return msgspec.msgpack.decode(_body(payload), type=kind)
    except MALFORMED as e:
        raise ProtocolError(f"not the answer of an agent: {e}") from e


def _body(payload: bytes) -> memoryview:
    if not payload or payload[0] != VERSION:
        raise ProtocolError(f"an agent speaks version {payload[:1].hex() or 'nothing'}, this one {VERSION}")
    return memoryview(payload)[1:]
