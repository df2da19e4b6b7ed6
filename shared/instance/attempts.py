"""The attempts an instance holds, dropped or finished, and what its conductors' live lists do to them.

Pure: time is passed in. The rules named here (``# rule: ...``) are those of the checked protocol models: of attempts
(``tombstone``, ``cancel_unknown``, ``done_known``, ``unknown``) and of the live list (``numbered``, ``since_submit``,
``reset``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from shared.errors import Refused, Tombstoned
from shared.messages import Ref

Key = tuple[str, int]
"""(request, attempt)."""

NOBODY = Ref("", 0)
MISSES = 3
KEEP_S = 180.0
"""How long tombstones and finished attempts are remembered: longer than any message can be in flight."""


class Phase(StrEnum):
    """Where an attempt is. The first three belong to prefill, the next three to decode."""

    QUEUED = "queued"
    LANDING = "landing"
    HOLD = "hold"
    ADMITTED = "admitted"
    LANDED = "landed"
    RUN = "run"
    DONE = "done"
    DROPPED = "dropped"

    @property
    def held(self) -> bool:
        return self not in (Phase.DONE, Phase.DROPPED)


@dataclass
class Attempt:
    """One attempt as this instance knows it. ``base``: the last list sent before it; ``heard``: link time at which its
    conductor was last heard of; ``ended``: wall time of its end (monotonic seconds), for forgetting."""

    key: Key
    gateway: Ref
    phase: Phase
    base: int = 0
    misses: int = 0
    heard: float = 0.0
    ended: float = 0.0


@dataclass
class LinkClock:
    """Seconds during which the bus connection was up and this process running: the clock that silence is measured by.

    It stands still while the connection is down, and no single look moves it by more than ``stride``: after this
    process was stopped, or starved, the messages that wait for it are heard before anybody is called silent.
    """

    stride: float = 0.5
    now: float = 0.0
    up: bool = True
    _last: float | None = None

    def look(self, wall: float) -> float:
        if self._last is not None and self.up:
            self.now += min(max(wall - self._last, 0.0), self.stride)
        self._last = wall
        return self.now

    def link(self, up: bool, wall: float) -> None:
        self.look(wall)
        self.up = up


@dataclass
class Lists:
    """What one conductor's lists have said so far: the highest number counted, and when (link time)."""

    top: int = 0
    heard: float = 0.0


@dataclass(frozen=True)
class ListOutcome:
    """``dropped``: attempts that this list was the third to miss. ``unknown``: listed as accepted, not known here."""

    dropped: list[Key]
    unknown: list[Key]


@dataclass
class AttemptTable:
    """All attempts of one instance. ``silence``: seconds without a list after which a conductor counts as dead."""

    silence: float = 3.0
    clock: LinkClock = field(default_factory=LinkClock)
    _attempts: dict[Key, Attempt] = field(default_factory=dict)
    _lists: dict[Ref, Lists] = field(default_factory=dict)

    def __len__(self) -> int:
        """Attempts held now."""
        return sum(1 for _ in self.held())

    def held(self) -> Iterator[Attempt]:
        return (a for a in self._attempts.values() if a.phase.held)

    def get(self, key: Key) -> Attempt | None:
        """The attempt in whatever phase, None where nothing is remembered of it."""
        return self._attempts.get(key)

    def phase(self, key: Key) -> Phase | None:
        attempt = self._attempts.get(key)
        return attempt.phase if attempt else None

    def accept(self, key: Key, gateway: Ref, phase: Phase, lists: int, wall: float) -> bool:
        """Take the attempt in; False when it was taken in before. Raises Tombstoned; it never comes back."""
        known = self._attempts.get(key)
        if known is None:
            now = self.clock.look(wall)
            self._attempts[key] = Attempt(key, gateway, phase, base=lists, heard=now)
            return True
        if known.phase is Phase.DROPPED:  # rule: tombstone
            raise Tombstoned(f"attempt {key[1]} of {key[0]} was dropped here before")
        if known.gateway not in (gateway, NOBODY):
            raise Refused(f"request {key[0]} belongs to another gateway", field="gateway")
        return False

    def count_from(self, key: Key, lists: int) -> None:
        """The gateway itself named the last list it had sent here before this attempt (rule: since_submit)."""
        if (attempt := self._attempts.get(key)) is not None:
            attempt.base = lists

    def move(self, key: Key, phase: Phase) -> None:
        """To a later phase; nothing moves once it has ended."""
        attempt = self._attempts.get(key)
        if attempt and attempt.phase.held:
            attempt.phase = phase

    def drop(self, key: Key, gateway: Ref, wall: float) -> bool:
        """Leave a tombstone; True when the attempt was held. What finished in good order stays finished."""
        attempt = self._attempts.get(key)
        if attempt is None:  # rule: cancel_unknown
            self._attempts[key] = Attempt(key, gateway, Phase.DROPPED, ended=wall)
            return False
        return self._end(attempt, Phase.DROPPED, wall)

    def finish(self, key: Key, wall: float) -> bool:
        """Ended in good order; True when it was held until now."""
        attempt = self._attempts.get(key)
        return attempt is not None and self._end(attempt, Phase.DONE, wall)

    def conclude(self, key: Key, wall: float) -> bool:
        """Its end was heard of, perhaps before anything else of it: finished, never to be taken in any more."""
        if key in self._attempts:
            return self.finish(key, wall)
        self._attempts[key] = Attempt(key, NOBODY, Phase.DONE, ended=wall)
        return False

    def listed(self, gateway: Ref, number: int, attempts: Sequence[tuple[str, int, bool]], wall: float) -> ListOutcome:
        """A live list came. Drops what three counted lists in a row did not hold."""
        unknown = [(r, n) for r, n, accepted in attempts if accepted and not self._known((r, n))]  # rule: unknown
        lists = self._lists.setdefault(gateway, Lists())
        if number <= lists.top:  # rule: numbered
            return ListOutcome([], unknown)
        lists.top, lists.heard = number, self.clock.look(wall)
        names = {(r, n) for r, n, _ in attempts}
        self._still_wanted(names, wall)
        missed = [a for a in self._of(gateway) if number > a.base and self._misses(a, a.key in names)]
        return ListOutcome(self._drop(missed, wall), unknown)

    def _still_wanted(self, keys: Iterable[Key], wall: float) -> None:
        """What is listed is remembered: its reader may be slow (rule: done_known)."""
        for key in keys:
            if (attempt := self._attempts.get(key)) is not None and not attempt.phase.held:
                attempt.ended = wall

    def tick(self, wall: float) -> list[Key]:
        """Drop what belongs to conductors that have been silent too long, and forget what ended long ago."""
        now = self.clock.look(wall)
        silent = [a for a in self.held() if now - max(a.heard, self._heard(a.gateway)) > self.silence]
        for key in [k for k, a in self._attempts.items() if not a.phase.held and wall - a.ended > KEEP_S]:
            del self._attempts[key]
        for gateway in [g for g, lists in self._lists.items() if now - lists.heard > KEEP_S]:
            del self._lists[gateway]
        return self._drop(silent, wall)

    def _known(self, key: Key) -> bool:
        attempt = self._attempts.get(key)
        return attempt is not None and attempt.phase is not Phase.DROPPED  # rule: done_known

    def _of(self, gateway: Ref) -> Iterator[Attempt]:
        return (a for a in self.held() if a.gateway == gateway)

    def _heard(self, gateway: Ref) -> float:
        lists = self._lists.get(gateway)
        return lists.heard if lists else 0.0

    def _misses(self, attempt: Attempt, named: bool) -> bool:
        attempt.misses = 0 if named else attempt.misses + 1  # rule: reset
        return attempt.misses >= MISSES

    def _drop(self, attempts: Iterable[Attempt], wall: float) -> list[Key]:
        return [a.key for a in attempts if self._end(a, Phase.DROPPED, wall)]

    def _end(self, attempt: Attempt, phase: Phase, wall: float) -> bool:
        if not attempt.phase.held:
            return False
        attempt.phase, attempt.ended = phase, wall
        return True
