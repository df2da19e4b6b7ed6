"""When a NIC or a path rests after failures, and when it may be tried again. Pure; seconds of any steady clock."""

from __future__ import annotations

from enum import Enum

FIRST = 0.2
LONGEST = 10.0
FORGIVEN = 30.0
"""After so many seconds without a failure the next rest is a first one again."""
SUSPICION = 10.0
"""Failures that are further apart than this do not count together."""


class Fault(Enum):
    """Whose failure it was.

    LOCAL: our NIC, its context or completion queue: it rests at once. LINK: the path, nobody can say which end: the
    path rests, and an end that fails with two different others without a success in between rests too. PEER: the other
    side answered, and refused (wrong key, out of range), or is not there at all: no NIC is at fault.
    """

    LOCAL = "local"
    LINK = "link"
    PEER = "peer"


class Rest:
    """The back-off of one NIC or one path: FIRST seconds, twice as long after each failed probe, LONGEST at most.

    Free until it fails. When the rest is over, one slice (the probe) may try; others only when that has succeeded, or
    has not been heard of for another rest.
    """

    __slots__ = ("failures", "last", "pause", "probing", "until")

    def __init__(self) -> None:
        self.until: float | None = None  # None: not resting
        self.pause = 0.0
        self.last = float("-inf")  # when it last began to rest for a failure
        self.probing = False
        self.failures = 0

    def failed(self, now: float) -> None:
        """What else was in flight fails from the same cause: during a rest only the probe's failure counts."""
        self.failures += 1
        if self.resting(now) and not self.probing:
            return
        again = self.pause > 0 and now - self.last < FORGIVEN
        self._begin(now, min(LONGEST, 2 * self.pause) if again else FIRST)

    def down(self, now: float) -> None:
        """The device says that it is down: no probe for as long as there ever is none, unless it is said to be up."""
        self.failures += 1
        self._begin(now, LONGEST)

    def works(self) -> None:
        """It carried something."""
        self.until, self.probing = None, False

    def up(self) -> None:
        """It is known to be in order: nothing of the past counts."""
        self.works()
        self.pause = 0.0

    def resting(self, now: float) -> bool:
        return self.until is not None and now < self.until

    def due(self, now: float) -> bool:
        """A probe may try it now."""
        return self.until is not None and now >= self.until

    def probe(self, now: float) -> None:
        """If one is due: it is on its way."""
        if self.due(now):
            self.until, self.probing = now + self.pause, True

    def _begin(self, now: float, pause: float) -> None:
        self.pause, self.last, self.until, self.probing = pause, now, now + pause, False


class Suspects:
    """The counterparts with which one end failed lately, without a success of that end in between."""

    __slots__ = ("_since",)

    def __init__(self) -> None:
        self._since: dict[object, float] = {}

    def add(self, counterpart: object, now: float) -> int:
        """How many different ones there are now."""
        self._since = {who: at for who, at in self._since.items() if now - at < SUSPICION}
        self._since[counterpart] = now
        return len(self._since)

    def clear(self) -> None:
        if self._since:
            self._since = {}
