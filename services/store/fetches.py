"""Fetches in flight on this node, one for a key, whoever asks (a fetch is a writer too); whom to ask first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Split(Generic[T]):
    """``mine``: keys whose fetch the caller starts. ``others``: the flights that bring the rest."""

    mine: list[bytes]
    others: dict[bytes, T]


class FetchTable(Generic[T]):
    """Keys in flight. A key leaves only when its read has completed or its endpoint is destroyed (``dest_held``):
    until then nobody asks for it again."""

    def __init__(self) -> None:
        self._flights: dict[bytes, T] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, key: bytes) -> bool:
        return key in self._flights

    def split(self, keys: Sequence[bytes]) -> Split[T]:
        others = {key: self._flights[key] for key in keys if key in self._flights}
        return Split(list(dict.fromkeys(key for key in keys if key not in others)), others)

    def begin(self, keys: Iterable[bytes], flight: T) -> None:
        for key in keys:
            if key in self._flights:
                raise ValueError("a fetch of this key is in flight")
            self._flights[key] = flight

    def end(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._flights.pop(key, None)


class Habit:
    """The agent that had all that was asked for, ``ENOUGH`` times in a row: ``guess``, "" for none."""

    ENOUGH = 2

    def __init__(self) -> None:
        self._agent = ""
        self._times = 0

    @property
    def guess(self) -> str:
        return self._agent if self._times >= self.ENOUGH else ""

    def gave(self, agent: str, count: int, of: int) -> None:
        """``agent`` was asked for ``of`` blocks and had ``count``."""
        if count < of:
            self._times = 0
        elif agent == self._agent:
            self._times += 1
        else:
            self._agent, self._times = agent, 1
