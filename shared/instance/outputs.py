"""Outputs kept for ``tokens.since``, from index 0 until the gateway has them all. Pure; time is passed in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.errors import UnknownAttempt
from shared.instance.attempts import Key
from shared.messages import Output, Usage

KEEP_S = 60.0
"""How long the outputs of an ended attempt that its gateway lists no longer wait for the acknowledgement."""

MOST = 4096
"""Outputs in one answer to ``since``; who is further behind asks again."""


@dataclass
class Kept:
    """Outputs of one attempt, without holes. ``first`` is the index of the first (above 0 after a migration)."""

    first: int
    outputs: list[Output] = field(default_factory=list)
    usage: Usage | None = None
    ended: float | None = None

    @property
    def next(self) -> int:
        return self.first + len(self.outputs)

    @property
    def finished(self) -> bool:
        return bool(self.outputs) and bool(self.outputs[-1].finish)


@dataclass
class OutputLog:
    """All kept outputs of one instance."""

    _kept: dict[Key, Kept] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, key: Key, output: Output, usage: Usage | None = None) -> bool:
        """Append; False for one that is there already (a repeated start). An index beyond the next is a bug."""
        kept = self._kept.setdefault(key, Kept(output.index))
        if output.index < kept.next:
            return False
        if output.index > kept.next or kept.finished:
            raise ValueError(f"output {output.index} of {key} after {kept.next - 1}, finished: {kept.finished}")
        kept.outputs.append(output)
        kept.usage = kept.usage or usage
        return True

    def since(self, key: Key, index: int, most: int = 0) -> tuple[int, list[Output], Usage | None]:
        """(first index, outputs from there on as far as drawn, usage): ``most`` of them, or ``MOST``. Raises
        UnknownAttempt."""
        kept = self._kept.get(key)
        if kept is None:  # rule: unknown
            raise UnknownAttempt(f"no outputs of attempt {key[1]} of {key[0]} are kept here")
        start = max(index, kept.first)  # rule: from_zero
        usage = kept.usage if start == kept.first else None
        return start, kept.outputs[start - kept.first :][: min(most or MOST, MOST)], usage

    def end(self, key: Key, now: float) -> None:
        """The attempt is over; what it drew stays until acknowledged or expired (rule: keep_outputs)."""
        kept = self._kept.get(key)
        if kept is not None and kept.ended is None:
            kept.ended = now

    def listed(self, keys: Iterable[Key], now: float) -> None:
        """The gateway still has readers for these: of those that are over, the time to be kept begins anew."""
        for key in keys:
            if (kept := self._kept.get(key)) is not None and kept.ended is not None:
                kept.ended = now

    def forget(self, keys: Iterable[Key]) -> None:
        """Acknowledged, cancelled or given up."""
        for key in keys:
            self._kept.pop(key, None)

    def acknowledge(self, keys: Iterable[Key]) -> None:
        """The gateway has them in full; of an attempt that still runs nothing is forgotten."""
        self.forget([k for k in keys if (kept := self._kept.get(k)) and kept.ended is not None])

    def expire(self, now: float) -> None:
        self.forget([k for k, kept in self._kept.items() if kept.ended is not None and now - kept.ended > KEEP_S])
