"""What an agent must know of the others, and tell them: where blocks are, and how an agent is reached.

The real one stands on the mesh's metadata and block index (:mod:`services.store.registration`);
:class:`LocalDirectory` is its in-memory twin, shared by the agents of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.store.placement import Place
from services.store.sources import Copy
from services.store.transfer.base import Peer
from shared.errors import PeerGone
from shared.index import DRAM


class Directory(Protocol):
    def committed(self, parent: bytes, keys: Sequence[bytes], tier: int = DRAM) -> None:
        """These blocks, which follow each other after ``parent``, are here now, at ``tier`` (DRAM 0, SSD 1). Published
        soon, in order."""

    def evicted(self, keys: Sequence[bytes]) -> None:
        """These are not here any more."""

    async def flushed(self, timeout: float) -> None:
        """Wait until all that was committed before is in the index. Raises Unavailable at the timeout."""

    async def locate(self, keys: Sequence[bytes]) -> list[list[str]]:
        """Ids of the agents that probably have each key, without this one: those with it in DRAM first, then the
        least loaded. Empty lists when the index cannot be asked."""

    async def copies(self, keys: Sequence[bytes]) -> list[list[Copy]]:
        """What others probably have of each key. Empty lists when the index cannot be asked."""

    async def peer(self, id: str) -> Peer:
        """Raises PeerGone."""

    async def places(self) -> list[Place]:
        """The agents that live, this one too. Raises Unavailable when nobody can be asked."""

    async def may_drop(self, keys: Sequence[bytes], keep: int) -> list[bool]:
        """For each key: would ``keep`` copies at others be left without ours? Who is told yes must drop it. Raises
        Unavailable."""


def ids_of(copies: Sequence[Sequence[Copy]]) -> list[list[str]]:
    """As :meth:`Directory.locate` gives them."""
    return [[c.agent for c in sorted(of_key, key=lambda c: (c.tier, c.backlog))] for of_key in copies]


class Board:
    """The state that the twins share."""

    def __init__(self) -> None:
        self.peers: dict[str, Peer] = {}
        self.nodes: dict[str, str] = {}
        self.blocks: dict[bytes, dict[str, int]] = {}  # tier by agent


class LocalDirectory:
    """See the module. ``board`` is common to all agents; ``id`` is set when the agent starts. ``tiers``: what
    this one has published."""

    def __init__(self, board: Board, id: str = "") -> None:
        self._board = board
        self.id = id
        self.tiers: dict[bytes, int] = {}

    def join(self, peer: Peer, node: str = "") -> None:
        self._board.peers[peer.ref.id] = peer
        self._board.nodes[peer.ref.id] = node or peer.ref.id

    def leave(self) -> None:
        self._board.peers.pop(self.id, None)
        for holders in self._board.blocks.values():
            holders.pop(self.id, None)

    def committed(self, parent: bytes, keys: Sequence[bytes], tier: int = DRAM) -> None:
        for key in keys:
            self.tiers[key] = tier
            self._board.blocks.setdefault(key, {})[self.id] = tier

    def evicted(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.tiers.pop(key, None)
            self._board.blocks.get(key, {}).pop(self.id, None)

    async def flushed(self, timeout: float) -> None:
        return None

    async def locate(self, keys: Sequence[bytes]) -> list[list[str]]:
        return ids_of(await self.copies(keys))

    async def copies(self, keys: Sequence[bytes]) -> list[list[Copy]]:
        found = [self._board.blocks.get(key, {}) for key in keys]
        return [[Copy(id, tier) for id, tier in holders.items() if id != self.id] for holders in found]

    async def peer(self, id: str) -> Peer:
        try:
            return self._board.peers[id]
        except KeyError:
            raise PeerGone(f"no agent {id}") from None

    async def places(self) -> list[Place]:
        return [Place(id, self._board.nodes[id]) for id in self._board.peers]

    async def may_drop(self, keys: Sequence[bytes], keep: int) -> list[bool]:
        holders = [set(self._board.blocks.get(key, ())) & self._board.peers.keys() for key in keys]
        return [self.id in ids and len(ids) > keep for ids in holders]
