"""Continuous batching: who runs, who waits to join, who must give way. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.decode.sequence import Sequence


@dataclass
class Batch:
    """Sequences join at step boundaries, oldest request first, up to ``limit``."""

    limit: int
    running: list[Sequence] = field(default_factory=list)
    waiting: list[Sequence] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the running ones attend to."""
        return sum(sequence.length for sequence in self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Idempotent."""
        self.running = [s for s in self.running if s is not sequence]
        self.waiting = [s for s in self.waiting if s is not sequence]

    def join(self) -> list[Sequence]:
        """At a step boundary: those that run from now on."""
        self.waiting.sort(key=_age)
        room = max(0, self.limit - len(self.running))
        joined, self.waiting = self.waiting[:room], self.waiting[room:]
        self.running += joined
        return joined

    def starving(self) -> list[Sequence]:
        """Running ones that need a slot before they can make a step, oldest first."""
        return sorted((s for s in self.running if s.wants_slot), key=_age)

    def youngest(self) -> Sequence | None:
        """Who gives way when there is no room to grow (rule: growth preempts the youngest, at last itself)."""
        return max([*self.running, *self.waiting], key=_age, default=None)


def _age(sequence: Sequence) -> tuple[float, str, int]:
    return (sequence.born, *sequence.key)
