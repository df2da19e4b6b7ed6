"""Who computes next on the one compute thread. Pure.

Order is by deadline (earliest first), which priority moves, among those that are ready; a request still fetching its
prefix does not hold up the ready ones behind it. Nobody starves: a deadline stands, and later requests have later ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from shared.instance.attempts import Key
from shared.latency import PrefillModel, due_in

Place = tuple[float, float, Key]


def due_at(now: float, deadline_ms: int, priority: int) -> float:
    """What a request is ordered by: when its first token is due, as moved by its priority (higher is more urgent)."""
    return now + due_in(deadline_ms / 1000, priority)


@dataclass
class Waiting:
    """``due``: see :func:`due_at`; of those that are due together, the one that was ``born`` (arrived) first. Seconds.
    ``tokens`` in all, of which ``done`` are cached or computed."""

    key: Key
    due: float
    born: float
    tokens: int
    done: int = 0
    ready: bool = False

    @property
    def place(self) -> Place:
        return self.due, self.born, self.key


@dataclass
class Left:
    """What waits or computes now, as exact sums: a burst of requests asks for them as often as it is long."""

    requests: int = 0
    tokens: int = 0
    squares: int = 0

    def count(self, entry: Waiting, sign: int) -> None:
        if entry.done < entry.tokens:
            self.requests += sign
            self.squares += sign * (entry.tokens**2 - entry.done**2)
        self.tokens += sign * (entry.tokens - entry.done)


@dataclass
class PrefillQueue:
    """Requests from their submission until their first token. ``ahead``: how many ready ones besides the current
    one may already ask for their landing."""

    model: PrefillModel
    ahead: int = 1
    current: Key | None = None
    _waiting: dict[Key, Waiting] = field(default_factory=dict)
    _ready: list[Place] = field(default_factory=list)
    _left: Left = field(default_factory=Left)

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, key: Key, due: float, born: float, tokens: int, done: int = 0) -> None:
        entry = self._waiting[key] = Waiting(key, due, born, tokens, done)
        self._left.count(entry, 1)

    def progress(self, key: Key, done: int) -> None:
        """``done`` of its tokens are known to be cached, or are computed."""
        if (entry := self._waiting.get(key)) is not None:
            self._left.count(entry, -1)
            entry.done = done
            self._left.count(entry, 1)

    def ready(self, key: Key) -> None:
        entry = self._waiting.get(key)
        if entry is not None and not entry.ready:
            entry.ready = True
            insort(self._ready, entry.place)

    def commit(self, key: Key) -> None:
        """It holds memory for its turn from now on, here and at decode: nobody goes before it any more."""
        entry = self._waiting.get(key)
        if entry is not None and entry.ready and self.current != key:
            del self._ready[bisect_left(self._ready, entry.place)]
            entry.due = -math.inf
            insort(self._ready, entry.place)

    def leave(self, key: Key) -> None:
        """Its first token is drawn, or it was dropped. Idempotent."""
        entry = self._waiting.pop(key, None)
        if entry is None:
            return
        self._left.count(entry, -1)
        if self.current == key:
            self.current = None
        elif entry.ready:
            del self._ready[bisect_left(self._ready, entry.place)]

    def advance(self) -> Key | None:
        """Give the compute thread to the ready request that is due first if it is free; that request, if it was."""
        if self.current is None and self._ready:
            self.current = self._ready.pop(0)[-1]
            return self.current
        return None

    def front(self) -> list[Key]:
        """Who computes now or soon: the time to ask for their landings."""
        soon = [place[-1] for place in self._ready[: self.ahead]]
        return soon if self.current is None else [self.current, *soon]

    def near(self, key: Key) -> bool:
        return key in self.front()

    @property
    def queued_tokens(self) -> int:
        return self._left.tokens

    def queue_ms(self) -> float:
        """Predicted time to compute everything that waits or computes now."""
        left, model = self._left, self.model
        return 1000 * (model.base * left.requests + model.linear * left.tokens + model.square * left.squares)
