"""Which pair of NICs carries the next slice: preferred ones, the least queued first; on a retry another pair. Pure.

Not thread-safe: whoever owns it holds one lock for an agent's :class:`Nics` and all its :class:`Paths`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from operator import attrgetter

from services.store.transfer.topology.health import Fault, Rest, Suspects
from services.store.transfer.topology.matrix import Matrix

ENOUGH = 2
"""An end that failed with so many different others rests itself."""


class Nic:
    """One NIC of an agent, seen from here. ``queued``: bytes posted on it and not settled, by this agent."""

    __slots__ = ("carried", "name", "queued", "rest", "suspects", "turn")

    def __init__(self, name: str) -> None:
        self.name = name
        self.queued = 0
        self.carried = 0
        self.turn = 0
        self.rest = Rest()
        self.suspects = Suspects()

    def __repr__(self) -> str:
        return f"Nic({self.name!r}, queued={self.queued})"


class Path:
    """A local and a remote NIC: what one endpoint joins. The same object each time, so it may be a key.

    ``open``: slices posted and not settled.
    """

    __slots__ = ("local", "open", "remote", "rest")

    def __init__(self, local: Nic, remote: Nic) -> None:
        self.local = local
        self.remote = remote
        self.rest = Rest()
        self.open = 0

    def __repr__(self) -> str:
        return f"Path({self.local.name} -> {self.remote.name})"

    def resting(self, now: float) -> bool:
        return self.rest.resting(now) or self.local.rest.resting(now) or self.remote.rest.resting(now)

    def due(self, now: float) -> bool:
        """Its next slice is a probe of it, or of its remote NIC."""
        return self.rest.due(now) or self.remote.rest.due(now)

    def until(self) -> float | None:
        """When it may carry something again; None: now."""
        return max((rest.until for rest in self._rests() if rest.until is not None), default=None)

    def probe(self, now: float) -> None:
        """Whatever of it has rested long enough is tried now."""
        for rest in self._rests():
            rest.probe(now)

    def _rests(self) -> tuple[Rest, Rest, Rest]:
        return self.rest, self.local.rest, self.remote.rest


_load: Callable[[Nic], tuple[int, int]] = attrgetter("queued", "turn")
"""The least queued comes first, among equals the one that was chosen longest ago."""

Tier = tuple[tuple[Nic, ...], tuple[Nic, ...]]


class Nics:
    """The NICs of one agent: of this one (shared by the paths to all peers), or of a peer as this one sees them.

    ``troubled``: those that failed and have not worked since; while there are none, nobody looks for rests.
    """

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix
        self.by_name = {name: Nic(name) for name in matrix.nics}
        self.troubled: set[Nic] = set()
        self._tiers: dict[str, Tier] = {}
        self.turn = 0  # choices so far

    def __iter__(self) -> Iterator[Nic]:
        return iter(self.by_name.values())

    def tiers(self, location: str) -> Tier:
        """(normal, further): the preferred NICs first; where there are none, the secondary ones are normal."""
        if location not in self._tiers:
            preferred, secondary = (tuple(self.by_name[n] for n in tier) for tier in self.matrix.at(location))
            self._tiers[location] = (preferred, secondary) if preferred else (secondary, ())
        return self._tiers[location]

    def failed(self, nic: Nic, now: float) -> None:
        self.troubled.add(nic)
        nic.rest.failed(now)

    def worked(self, nic: Nic) -> None:
        self.troubled.discard(nic)
        nic.rest.works()

    def down(self, name: str, now: float) -> None:
        """The device reports its port, context or completion queue as failed."""
        self.troubled.add(self.by_name[name])
        self.by_name[name].rest.down(now)

    def up(self, name: str) -> None:
        """The device reports it as working again."""
        nic = self.by_name[name]
        self.troubled.discard(nic)
        nic.rest.up()
        nic.suspects.clear()


class Paths:
    """All paths from this agent to one peer. ``peer`` tells it from other peers (its :class:`shared.messages.Ref`)."""

    def __init__(self, here: Nics, there: Nics, peer: Hashable) -> None:
        self.here = here
        self.there = there
        self.peer = peer
        self._paths: dict[tuple[Nic, Nic], Path] = {}
        self._troubled: set[Path] = set()

    def path(self, local: str, remote: str) -> Path:
        """Raises KeyError for a NIC that is in no matrix."""
        return self._joining(self.here.by_name[local], self.there.by_name[remote])

    def _joining(self, local: Nic, remote: Nic) -> Path:
        path = self._paths.get((local, remote))
        if path is None:
            path = self._paths[local, remote] = Path(local, remote)
        return path

    # -- choosing -------------------------------------------------------------------------------------------

    def choose(self, local: str, remote: str, now: float, tried: Sequence[Path] = ()) -> Path | None:
        """The path for a slice between memory at location ``local`` here and ``remote`` there; None while all rest
        (see :meth:`ready_at`), or where an end has no NIC.

        First time: the preferred NICs of both ends, the one with the least queued bytes here, then there; among
        equals the one that was chosen longest ago. Others only while all paths between preferred ones rest. On retry k,
        ``tried`` holds the k paths on which it failed: one is taken that differs from them at both ends if there is
        any, preferred before secondary, before one that differs at one end. What has rested long enough comes before
        its equals, and being chosen is its probe.
        """
        if not (tried or self.here.troubled or self.there.troubled or self._troubled):
            path = self._usual(local, remote)
        else:
            path = self._another(local, remote, now, tried) if tried else self._working(local, remote, now)
            if path is not None:
                path.probe(now)
        if path is not None:
            self.here.turn = path.local.turn = self.here.turn + 1
            self.there.turn = path.remote.turn = self.there.turn + 1
        return path

    def ready_at(self, local: str, remote: str) -> float | None:
        """When the first of the resting paths may be tried; None where there is no path at all."""
        return min((path.until() or 0.0 for _, path in self._all(local, remote)), default=None)

    def _usual(self, local: str, remote: str) -> Path | None:
        here, there = self.here.tiers(local)[0], self.there.tiers(remote)[0]
        if not here or not there:
            return None
        mine = here[0] if len(here) == 1 else min(here, key=_load)
        return self._joining(mine, there[0] if len(there) == 1 else min(there, key=_load))

    def _working(self, local: str, remote: str, now: float) -> Path | None:
        """As usual, around what rests."""
        for here, there in self._groups(local, remote):
            for nic in sorted(here, key=lambda nic: (not nic.rest.due(now), *_load(nic))):
                paths = [self._joining(nic, other) for other in there]
                free = [path for path in paths if not path.resting(now)]
                if free:
                    return min(free, key=lambda path: (not path.due(now), *_load(path.remote)))
        return None

    def _another(self, local: str, remote: str, now: float, tried: Sequence[Path]) -> Path | None:
        def order(candidate: tuple[int, Path]) -> tuple[int, int, int, int, int, int, int]:
            far, path = candidate
            shared = sum((path.local is old.local) + (path.remote is old.remote) for old in tried)
            return tried.count(path), shared, far, *_load(path.local), *_load(path.remote)

        free = [(far, path) for far, path in self._all(local, remote) if not path.resting(now)]
        return min(free, key=order)[1] if free else None

    def _groups(self, local: str, remote: str) -> Iterator[tuple[tuple[Nic, ...], tuple[Nic, ...]]]:
        """Both ends preferred, then one, then none."""
        (here, far_here), (there, far_there) = self.here.tiers(local), self.there.tiers(remote)
        yield from ((here, there), (here, far_there), (far_here, there), (far_here, far_there))

    def _all(self, local: str, remote: str) -> Iterator[tuple[int, Path]]:
        """(secondary ends, path)."""
        for far, (here, there) in zip((0, 1, 1, 2), self._groups(local, remote), strict=True):
            for nic in here:
                for other in there:
                    yield far, self._joining(nic, other)

    # -- what became of it ----------------------------------------------------------------------------------

    def posted(self, path: Path, length: int) -> None:
        """A slice of ``length`` bytes is queued on ``path``; to be settled exactly once."""
        path.open += 1
        path.local.queued += length
        path.remote.queued += length

    def settled(self, path: Path, length: int, slices: int = 1) -> None:
        """They are on their way no more, whatever became of them; ``length`` bytes together."""
        path.open -= slices
        path.local.queued -= length
        path.remote.queued -= length

    def worked(self, path: Path, length: int) -> None:
        """``length`` bytes arrived over ``path``: none of it rests any longer."""
        path.local.carried += length
        path.remote.carried += length
        path.local.suspects.clear()
        path.remote.suspects.clear()
        if path.rest.until is not None:
            path.rest.works()
            self._troubled.discard(path)
        self.here.worked(path.local)
        self.there.worked(path.remote)

    def failed(self, path: Path, fault: Fault, now: float) -> None:
        """Report a failed endpoint once, not once for each of its slices."""
        if fault is Fault.LOCAL:
            self.here.failed(path.local, now)
        elif fault is Fault.LINK:
            self._troubled.add(path)
            path.rest.failed(now)
            if path.local.suspects.add(self.peer, now) >= ENOUGH or path.local.rest.probing:
                self.here.failed(path.local, now)
            if path.remote.suspects.add(path.local.name, now) >= ENOUGH or path.remote.rest.probing:
                self.there.failed(path.remote, now)
