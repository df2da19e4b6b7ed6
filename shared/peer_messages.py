"""What conductors tell each other of promises and traces, and ask of prefill instances for hot prefixes."""

from __future__ import annotations

import enum

import msgspec

from shared.message import Message
from shared.span_record import SpanRecord


class Promise(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An attempt that a conductor has placed, as the others count it. ``number`` is the conductor's own.

    ``work_ms``: predicted time at prefill; ``ready_ms``: from now until its first token; ``stays_ms``: how long it then
    decodes. ``blocks``: promised at decode; ``tokens``: that it will attend to. ``source``: agent of the planned fetch
    ("" without one), ``fetch_bytes`` from there within ``fetched_ms``. ``keys``: chain of the blocks that prefill will
    have. ``steps``: bits of :class:`Step`. ``tbt_ms``: what its client was promised between tokens (0: nothing).
    ``due_ms``: what prefill orders it by, and ``by_ms``: when its first token was promised (0: nobody goes before it).
    """

    number: int
    prefill: str
    decode: str
    work_ms: float
    ready_ms: float
    stays_ms: float
    blocks: int
    tokens: float
    source: str = ""
    fetch_bytes: int = 0
    fetched_ms: float = 0.0
    keys: bytes = b""
    steps: int = 0
    tbt_ms: float = 0.0
    due_ms: float = 0.0
    by_ms: float = 0.0


class Step(enum.IntFlag):
    """What has become of a promise: reports of its prefill or decode instance count it; its first token came; over."""

    AT_PREFILL = 1
    AT_DECODE = 2
    PREFILLED = 4
    OVER = 8


class Promises(Message, frozen=True, kw_only=True, tag="promises"):
    """Conductor -> conductor, not answered; hints. ``placed``: since the last message. ``steps``: (number, step) of
    promises told before. ``all``: once a second, every promise that stands, without keys; others are over."""

    placed: list[Promise] = msgspec.field(default_factory=list)
    steps: list[tuple[int, int]] = msgspec.field(default_factory=list)
    all: list[Promise] | None = None


class Replicas(Message, frozen=True, kw_only=True, tag="replicas"):
    """Conductor -> prefill: have the consecutive blocks ``bring`` (after ``before``, b"" at the start) at your node,
    from one of ``sources``; let go of its copies of ``drop`` where ``keep`` others are left. Answer: ReplicasDone."""

    before: bytes = b""
    bring: bytes = b""
    sources: list[str] = msgspec.field(default_factory=list)
    drop: bytes = b""
    keep: int = 1


class ReplicasDone(Message, frozen=True, kw_only=True, tag="replicas_done"):
    """Blocks: ``there`` of those to bring, ``fetched`` from elsewhere for it, ``dropped``."""

    there: int = 0
    fetched: int = 0
    dropped: int = 0


class FindTrace(Message, frozen=True, kw_only=True, tag="find_trace"):
    """Did you serve this request of this tenant? ``request``: any id that the tenant may have of it. Answer:
    FoundTrace."""

    request: str
    tenant: str


class FoundTrace(Message, frozen=True, kw_only=True, tag="found_trace"):
    """``trace`` "": no, or it is forgotten. ``root``: the request's own span. ``spans``: the conductor's own."""

    trace: str = ""
    root: str = ""
    spans: list[SpanRecord] = msgspec.field(default_factory=list)
