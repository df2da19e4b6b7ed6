"""The interfaces between engines, the services that drive them, and the node's store.

An engine computes; it knows no request, no bus and no clock. It reads and writes KV in the slots of the pool that
the store agent of its node owns; the service passes it slot numbers. The service gets the store as
:class:`KVStore`; ``services.store.client.StoreClient`` is the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol, runtime_checkable

from shared.blocks import Geometry, Namespace, Tokens
from shared.latency import DecodeModel, PrefillModel
from shared.messages import Logprob, Ref, Sampling

# -- engines -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PoolMap:
    """The node's pool as an engine sees it. ``path`` can be opened read-write (also /proc/self/fd/N) and stays valid
    as long as the KVStore that gave it. Slot s of ``geometry`` starts at byte ``offset + s * stride``."""

    path: str
    offset: int
    stride: int
    slots: int
    geometry: Geometry


@dataclass(frozen=True)
class Draw:
    """Ask for a token after the last position of this work item. ``position``: index of the output drawn;
    ``outputs``: the outputs before it (for penalties)."""

    sampling: Sampling
    position: int
    choice: int = 0
    prompt: Tokens | None = None
    outputs: Tokens | None = None


@dataclass
class Work:
    """One sequence's part of a step: compute ``tokens`` at positions ``start ..``, writing their KV.

    ``slots[i]`` holds positions [i*B, (i+1)*B); all positions before ``start`` are already there. The caller
    owns the slots and keeps them until the step has returned.
    """

    tokens: Tokens
    start: int
    slots: Sequence[int]
    draw: Draw | None = None


@dataclass(frozen=True)
class Drawn:
    token: int
    logprob: float = 0.0
    top: Sequence[Logprob] = field(default_factory=tuple)


LayerHook = Callable[[int], None]
"""Called on the compute thread when layer ``i`` of the current step has its KV in the pool, for all its work."""


class Engine(Protocol):
    """A loaded model on one device. Not thread-safe: one compute thread calls ``step``."""

    @property
    def namespace(self) -> Namespace:
        """Deployment namespace (no LoRA, no salt)."""

    @property
    def context_length(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def bind(self, pool: PoolMap) -> None:
        """Map the pool; called again with a new one after the agent restarted. Raises NamespaceMismatch when the
        geometry is not the engine's."""

    def unbind(self) -> None:
        """Let go of the mapping."""

    def step(self, batch: Sequence[Work], on_layer: LayerHook | None = None) -> list[Drawn | None]:
        """Blocking; one forward pass over the flattened batch. Result i is for batch[i], None without ``draw``."""


@runtime_checkable
class Timed(Protocol):
    """An engine that says itself how long its steps take: nobody measures it."""

    @property
    def latency(self) -> tuple[PrefillModel, DecodeModel]: ...


# -- the store, as a service on the same node sees it -------------------------------------------------------


class PoolClass(IntEnum):
    """What a slot is wanted for; lower is stronger."""

    GROWTH = 0
    LANDING = 1
    PREFILL = 2
    PREFETCH = 3
    CACHE = 4


@dataclass(frozen=True)
class Owner:
    """Who holds. ``id`` is opaque to the store ("request/attempt"); ``age`` orders requests (lower is older). What it
    commits counts against the quota of ``tenant``."""

    id: str
    age: float = 0.0
    tenant: str = ""


class Kind(IntEnum):
    """Outcome of a reservation for one key."""

    NEW = 0  # an uncommitted slot of ours: write it, then commit
    PRESENT = 1  # committed already: held, read only
    IN_PROGRESS = 2  # somebody here writes or fetches it: wait(key), or take a private slot


@dataclass(frozen=True)
class Held:
    """One slot held by this connection. Ends by ``release`` (or with the connection, once the process is dead).

    ``hold`` identifies the hold, not the slot: the same slot may be held many times. ``slot`` is -1 for IN_PROGRESS.
    """

    hold: int
    slot: int
    kind: Kind
    key: bytes = b""


@dataclass(frozen=True)
class Landing:
    """Slots at this node that one attempt's writer may fill. ``held[i]`` is block i's slot; blocks in ``have`` are
    committed copies kept here, not written by anybody. ``token`` is what the writer must show."""

    token: int
    held: Sequence[Held]
    have: frozenset[int]


@dataclass(frozen=True)
class LandingTarget:
    """A landing at another agent, as the writer's side names it (from LandingGrant)."""

    agent: Ref
    token: int
    slots: Sequence[int]
    segment: str = ""


@dataclass(frozen=True)
class Run:
    """What one stream call moves: layers [first_layer, last_layer) of tokens [first_token, last_token) of the block
    in local ``slot``, to block number ``block`` of the landing. Token numbers count inside the block."""

    slot: int
    block: int
    first_layer: int
    last_layer: int
    first_token: int
    last_token: int


@dataclass(frozen=True)
class Fetched:
    """Result for one key of a fetch: held copy in the local pool, or why not. ``bytes`` moved over ``transport``
    ("" when it was here already). ``length``: valid bytes of the held block, where the store knows."""

    held: Held | None
    transport: str = ""
    bytes: int = 0
    error: str = ""
    length: int = 0


class KVStore(Protocol):
    """One connection to the node's agent. All calls are async, batched, with results in input order; every one that
    waits takes a ``timeout`` in seconds and raises DeadlineExceeded. AgentGone after the agent has died: the
    service drains on the old mapping, reconnects, remaps.
    """

    @property
    def agent(self) -> Ref: ...

    @property
    def pool(self) -> PoolMap: ...

    @property
    def closed(self) -> bool:
        """True once the agent is gone."""

    async def lease(
        self, keys: Sequence[bytes], owner: Owner, pool_class: PoolClass = PoolClass.GROWTH
    ) -> list[Held | None]:
        """Hold committed blocks of the local pool; None where absent. Touches leaf first. Holds of class PREFETCH are
        soft: they keep a block only until a stronger class needs the room."""

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Local presence; neither leases nor touches."""

    async def reserve(self, keys: Sequence[bytes], owner: Owner, pool_class: PoolClass, timeout: float) -> list[Held]:
        """Phase one of writing known blocks. All or nothing on room: raises DoesNotFit or PoolFull."""

    async def allocate(self, count: int, owner: Owner, pool_class: PoolClass, timeout: float) -> list[Held]:
        """Private slots without a key (partial last blocks, growth of running sequences). All or nothing."""

    async def wait(self, key: bytes, owner: Owner, timeout: float) -> Held | None:
        """Wait for a block that is IN_PROGRESS: held when committed, None when its writer aborted."""

    async def commit(
        self, holds: Sequence[Held], parent: bytes, keys: Sequence[bytes], indexed: bool = False
    ) -> list[Held]:
        """Phase two: make slots visible under ``keys``, which follow each other after ``parent`` (b"" for unknown).
        The holds stay (now PRESENT). A private slot whose key is already present stays private (kind NEW)."""

    async def release(self, holds: Sequence[Held]) -> None:
        """End holds. Uncommitted slots are freed once their outgoing transfers have let go. Idempotent."""

    async def fetch(
        self,
        keys: Sequence[bytes],
        parent: bytes,
        sources: Sequence[str],
        owner: Owner,
        pool_class: PoolClass,
        timeout: float,
    ) -> list[Fetched]:
        """Have consecutive blocks here: local copies are held; others are leased at their owners (``sources``: agent
        ids to try, else the index is asked), read, verified, committed here and indexed. One fetch per key is in
        flight on a node; a second asker waits for the first."""

    async def open_landing(
        self,
        keys: Sequence[bytes],
        blocks: int,
        tokens: int,
        writer: Ref,
        owner: Owner,
        timeout: float,
        apart: frozenset[int] = frozenset(),
    ) -> Landing:
        """Slots for a prompt of ``tokens`` tokens in ``blocks`` blocks, the full ones named by ``keys``; whole or
        not at all. Present blocks are held and put in ``have``. Blocks ``apart`` are fetched by the caller into slots
        of its own: they get a slot here, but the writer does not owe them until :meth:`owe` says so."""

    async def missing(self, landing: Landing, timeout: float) -> int:
        """Wait until every layer and token that the writer owes is in memory, all its completions were reported, and
        nothing of it is being received any more: 0. At the timeout, how many layer-tokens are missing, at least 1.
        Raises Fenced when the landing ended."""

    async def owe(self, landing: Landing, blocks: Sequence[int]) -> None:
        """The writer now owes these blocks too (an own fetch failed); they must not be in flight any more."""

    async def close_landing(self, landing: Landing, keep: bool) -> list[Held]:
        """``keep`` (all landed): the slots become ordinary holds of this connection. Otherwise the landing is fenced
        and quarantined until its writer cannot write any more; its holds are over. Idempotent."""

    async def stream(self, target: LandingTarget, runs: Sequence[Run], owner: Owner, timeout: float) -> int:
        """Write runs into a landing at another agent. Returns the bytes moved when all of them are in the target's
        memory and reported there. Raises Fenced, TransferError. The local slots are held until then by the store."""


@runtime_checkable
class LettingGo(Protocol):
    """A store whose copies of blocks are counted over all nodes."""

    async def let_go(self, keys: Sequence[bytes], keep: int) -> list[bool]:
        """Drop this node's copies where ``keep`` others are left; True where it was dropped."""


@runtime_checkable
class Aborting(Protocol):
    """A store that tells when a request has to give way to an older one, or to growth."""

    def watch_aborts(self, told: Callable[[str], None]) -> None:
        """``told`` is called on the event loop with the :class:`Owner` id of a request: whoever runs it ends it and
        releases what it holds. Its landings are fenced already. One watcher for each connection."""
