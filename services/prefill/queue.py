"""Who computes next on the one compute thread. Pure.

Order is the age of the request (oldest first) among those that are ready; a request still fetching its prefix
does not hold up the ready ones behind it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.instance.attempts import Key
from shared.latency import PrefillModel


@dataclass
class Waiting:
    """``born``: when the request arrived, seconds. ``tokens`` in all, of which ``done`` are cached or computed."""

    key: Key
    born: float
    tokens: int
    done: int = 0
    ready: bool = False


@dataclass
class PrefillQueue:
    """Requests from their submission until their first token. ``ahead``: how many ready ones besides the current
    one may already ask for their landing."""

    model: PrefillModel
    ahead: int = 1
    current: Key | None = None
    _waiting: dict[Key, Waiting] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, key: Key, born: float, tokens: int, done: int) -> None:
        self._waiting[key] = Waiting(key, born, tokens, done)

    def progress(self, key: Key, done: int) -> None:
        """``done`` of its tokens are known to be cached, or are computed."""
        if (entry := self._waiting.get(key)) is not None:
            entry.done = done

    def ready(self, key: Key) -> None:
        if (entry := self._waiting.get(key)) is not None:
            entry.ready = True

    def leave(self, key: Key) -> None:
        """Its first token is drawn, or it was dropped. Idempotent."""
        self._waiting.pop(key, None)
        if self.current == key:
            self.current = None

    def advance(self) -> Key | None:
        """Give the compute thread to the oldest ready request if it is free; that request, if it was."""
        if self.current is None and (order := self._order()):
            self.current = order[0].key
            return self.current
        return None

    def near(self, key: Key) -> bool:
        """True when it computes now or soon: the time to ask for its landing."""
        return key == self.current or key in [entry.key for entry in self._order()[: self.ahead]]

    @property
    def queued_tokens(self) -> int:
        return sum(entry.tokens - entry.done for entry in self._waiting.values())

    def queue_ms(self) -> float:
        """Predicted time to compute everything that waits or computes now."""
        return 1000 * sum(self.model.seconds(e.tokens, e.done) for e in self._waiting.values() if e.done < e.tokens)

    def _order(self) -> list[Waiting]:
        ready = [entry for entry in self._waiting.values() if entry.ready and entry.key != self.current]
        return sorted(ready, key=lambda entry: (entry.born, entry.key))
