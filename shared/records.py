"""What processes publish of themselves in the metadata store (Redis): plain, typed, versioned by incarnation."""

from __future__ import annotations

import msgspec

from shared.blocks import Namespace
from shared.latency import DecodeModel, PrefillModel
from shared.messages import Load, Ref

PREFILL = "prefill"
DECODE = "decode"


class InstanceRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A prefill or decode instance. ``proof`` is ``namespace.proof()`` computed by itself. ``node`` is a display name.
    ``beat`` counts heartbeats; ``load.progress`` counts engine steps, so that a hung engine is seen."""

    ref: Ref
    role: str
    node: str
    model: str  # served model name
    namespace: Namespace
    proof: bytes
    agent: Ref
    context_length: int
    prefill: PrefillModel | None = None
    decode: DecodeModel | None = None
    load: Load = msgspec.field(default_factory=Load)
    beat: int = 0
    metrics: str = ""  # host:port
    pid: int = 0


class SlabRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The part of an agent's pool that one namespace has: ``blocks`` committed in DRAM, ``used`` slots held or being
    written, of ``slots`` with ``stride`` bytes each. ``segment`` is its name between agents."""

    segment: str
    namespace: Namespace
    stride: int
    slots: int
    used: int = 0
    blocks: int = 0


class SsdRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An agent's SSD tier. ``state``: on, full, or why it is off. ``bytes`` of ``capacity`` are taken by its files.
    ``written``, ``read`` (hits), ``skipped``, ``lost``: blocks since the agent started. Rates in bytes per second, 0
    while nothing was measured."""

    state: str
    capacity: int
    blocks: int = 0
    bytes: int = 0
    written: int = 0
    read: int = 0
    skipped: int = 0
    lost: int = 0
    read_rate: float = 0.0
    write_rate: float = 0.0


class NicRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One RDMA device of an agent. ``state``: active, down (the device says so), resting (after failures, ``rest``
    seconds from now) or lost (the device failed). ``gid``: its address, with kind and index. ``mtu`` in bytes.
    ``pairs``: queue pairs, of both directions; ``queued`` bytes of work requests on it. ``read``, ``written``: bytes
    that this agent's work requests moved over it since it started; ``broken``: those that broke their queue pair."""

    name: str
    state: str
    gid: str
    mtu: int = 0
    pairs: int = 0
    queued: int = 0
    read: int = 0
    written: int = 0
    broken: int = 0
    rest: float = 0.0


class AgentRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A store agent. ``code`` is the 8-byte name of this incarnation in the block index. ``backlog_bytes`` are
    outgoing reads queued now; ``rate`` the measured outgoing bytes per second (0: not yet known). ``topology``: for
    each memory location its preferred and its secondary NICs, ``{"cpu:0": [["mlx5_0"], ["mlx5_1"]]}``; empty without
    NICs. ``nics``: its RDMA devices, where RDMA is in use. ``ssd`` None: it has no such tier. ``socket``: where engines
    of its node attach.
    """

    ref: Ref
    node: str
    code: bytes
    host: str
    port: int
    host_id: str
    shm: str = ""
    transports: list[str] = []
    topology: dict[str, list[list[str]]] = {}
    nics: list[NicRecord] = []
    slots: int = 0
    used: int = 0
    slot_bytes: int = 0
    backlog_bytes: int = 0
    rate: float = 0.0
    held: dict[str, float] = {}
    slabs: list[SlabRecord] = []
    ssd: SsdRecord | None = None
    socket: str = ""
    beat: int = 0
    metrics: str = ""
    pid: int = 0


class ConductorRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    ref: Ref
    node: str
    url: str
    beat: int = 0
    pid: int = 0
