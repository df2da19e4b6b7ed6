"""What an engine and its node's agent say to each other on the Unix socket: typed MessagePack, one version.

    agent -> engine   Challenge
    engine -> agent   Hello (proof of the secret, namespace), with a pidfd of the engine beside it (SCM_RIGHTS)
    agent -> engine   Welcome, with the descriptors of pool and mailbox beside it (SCM_RIGHTS); or Denied
    engine -> agent   requests, each with an id of its own; of id 0 where nobody waits for an answer
    agent -> engine   Answer or Failed for each but id 0, in any order; Aborted at any time

Keys travel as one packed chain. Times are seconds from now.
"""

from __future__ import annotations

import hashlib
import hmac
from enum import IntEnum

import msgspec

from shared.blocks import Namespace
from shared.engines.base import Held, Kind, Owner, PoolClass
from shared.errors import InvalidInput, WireError
from shared.messages import Ref

VERSION = 2
NONCE = 32

HeldTuple = tuple[int, int, int]
"""(hold, slot, kind); the key is the asker's own."""


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    version: int
    nonce: bytes


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """``name`` is for people. ``proof`` = :func:`prove`."""

    version: int
    name: str
    proof: bytes
    namespace: Namespace


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    agent: Ref
    segment: str
    offset: int
    stride: int
    slots: int
    size: int


class Denied(msgspec.Struct, frozen=True, tag="denied"):
    """Instead of Welcome: the agent hangs up."""

    error: WireError


class Answer(msgspec.Struct, frozen=True, tag="ok", array_like=True):
    """``body`` has the type that the request's class names."""

    id: int
    body: msgspec.Raw


class Failed(msgspec.Struct, frozen=True, tag="no", array_like=True):
    """Request 0 is the connection itself."""

    id: int
    error: WireError


class Aborted(msgspec.Struct, frozen=True, tag="aborted", array_like=True):
    """Nobody asked: the request ``owner`` has to give way. Its landings here are fenced already; the engine ends it
    and releases what it holds."""

    owner: str


class Request(msgspec.Struct, frozen=True, tag_field="t", omit_defaults=True):
    """Root of the requests; each documents the type of its answer."""

    id: int


class By(msgspec.Struct, frozen=True, array_like=True):
    """An Owner and a pool class."""

    owner: str
    age: float
    pool_class: int
    tenant: str = ""

    def checked(self) -> tuple[Owner, PoolClass]:
        """Raises InvalidInput."""
        if self.age != self.age or self.pool_class not in PoolClass._value2member_map_:
            raise InvalidInput(f"age {self.age} or pool class {self.pool_class} is none", field="by")
        return Owner(self.owner, self.age, self.tenant), PoolClass(self.pool_class)


class LeaseLocal(Request, frozen=True, tag="lease"):
    """-> list[HeldTuple | None]"""

    keys: bytes
    by: By


class Contains(Request, frozen=True, tag="contains"):
    """-> list[bool]"""

    keys: bytes


class Reserve(Request, frozen=True, tag="reserve"):
    """-> list[HeldTuple]"""

    keys: bytes
    by: By
    timeout: float


class Allocate(Request, frozen=True, tag="allocate"):
    """-> list[HeldTuple]"""

    count: int
    by: By
    timeout: float


class Wait(Request, frozen=True, tag="wait"):
    """-> HeldTuple | None"""

    key: bytes
    by: By
    timeout: float


class Commit(Request, frozen=True, tag="commit"):
    """-> list[HeldTuple]. ``lengths`` empty: whole slots. ``chained`` False: every key has ``parent`` itself.
    ``release``: the holds end with it."""

    holds: list[int]
    parent: bytes
    keys: bytes
    lengths: list[int] = []
    indexed: bool = False
    chained: bool = True
    timeout: float = 10.0
    release: bool = False


class Posted(IntEnum):
    """What became of one item of a Put. LATER: nothing, for lack of room or because another one writes the key; reserve
    it."""

    STORED = 0
    PRESENT = 1
    LATER = 2


class Put(Request, frozen=True, tag="put"):
    """-> list[Posted]. Reserve, the bytes and commit of objects in one: they lie in the connection's mailbox, one after
    the other. Nothing stays held."""

    keys: bytes
    lengths: list[int]
    by: By


class Release(Request, frozen=True, tag="release"):
    """-> None"""

    holds: list[int]


class Fetch(Request, frozen=True, tag="fetch"):
    """-> list[FetchedTuple]. ``trace``: W3C trace context of the asker."""

    keys: bytes
    parent: bytes
    sources: list[str]
    by: By
    timeout: float
    chained: bool = True
    trace: dict[str, str] = {}


class OpenLanding(Request, frozen=True, tag="open_landing"):
    """-> Opened. ``trace`` as in Fetch."""

    keys: bytes
    blocks: int
    tokens: int
    writer: Ref
    by: By
    timeout: float
    apart: list[int] = []
    trace: dict[str, str] = {}


class Missing(Request, frozen=True, tag="missing"):
    """-> int"""

    token: int
    timeout: float


class Owe(Request, frozen=True, tag="owe"):
    """-> None"""

    token: int
    blocks: list[int]


class CloseLanding(Request, frozen=True, tag="close_landing"):
    """-> list[HeldTuple]"""

    token: int
    keep: bool


class Stream(Request, frozen=True, tag="stream"):
    """-> int. ``runs``: (slot, block, first_layer, last_layer, first_token, last_token). ``trace`` as in Fetch."""

    agent: Ref
    token: int
    slots: list[int]
    runs: list[tuple[int, int, int, int, int, int]]
    timeout: float
    trace: dict[str, str] = {}
    segment: str = ""


class Remove(Request, frozen=True, tag="remove"):
    """-> list[bool]: was it there, here or elsewhere?"""

    keys: bytes
    timeout: float


class ChangeReplica(Request, frozen=True, tag="change_replica"):
    """-> list[Copies]"""

    keys: bytes
    copies: int
    timeout: float


class LetGo(Request, frozen=True, tag="let_go"):
    """-> list[bool]: was this agent's copy dropped? Only where ``keep`` copies at others are left."""

    keys: bytes
    keep: int


class Pin(Request, frozen=True, tag="pin"):
    """-> list[Outcome]: is it pinned? ``ttl`` in seconds; infinite: until it is unpinned."""

    keys: bytes
    owner: str
    hard: bool
    ttl: float


class Unpin(Request, frozen=True, tag="unpin"):
    """-> list[bool]: was it pinned by this owner?"""

    keys: bytes
    owner: str


class GiveUp(Request, frozen=True, tag="give_up"):
    """-> None. Nobody waits for the answer to ``request`` any more. It is answered all the same."""

    request: int


class Stats(Request, frozen=True, tag="stats"):
    """-> dict[str, float]"""


class Bye(Request, frozen=True, tag="bye"):
    """-> None. The engine gives all its holds back and writes no more."""


AnyRequest = (
    LeaseLocal
    | Contains
    | Reserve
    | Allocate
    | Wait
    | Commit
    | Put
    | Release
    | Fetch
    | OpenLanding
    | Missing
    | Owe
    | CloseLanding
    | Stream
    | Remove
    | ChangeReplica
    | LetGo
    | Pin
    | Unpin
    | GiveUp
    | Stats
    | Bye
)


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """Of one item of a batch."""

    done: bool
    error: WireError | None = None


class Copies(msgspec.Struct, frozen=True, array_like=True):
    """Agents that have the block, and why they are not as many as asked for."""

    agents: list[str]
    error: WireError | None = None


class FetchedTuple(msgspec.Struct, frozen=True, array_like=True):
    held: HeldTuple | None
    transport: str = ""
    bytes: int = 0
    error: str = ""
    length: int = 0


class Opened(msgspec.Struct, frozen=True, array_like=True):
    token: int
    held: list[HeldTuple]
    have: list[int]


def prove(secret: str, nonce: bytes) -> bytes:
    return hmac.new(secret.encode(), b"mooncake local" + nonce, hashlib.sha256).digest()


def pack_held(held: Held) -> HeldTuple:
    return held.hold, held.slot, held.kind.value


def unpack_held(packed: HeldTuple, key: bytes = b"") -> Held:
    return Held(packed[0], packed[1], Kind(packed[2]), key)
