"""Blocks that an instance does not have yet but will: those of accepted requests still in its queue."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from shared.blocks import KEY, iter_keys, key_count


@dataclass(slots=True)
class Promise:
    count: int
    ready_at: float


class Optimistic:
    """(block key, instance) -> promise. Chained keys make presence monotone along a prompt, so matches bisect."""

    def __init__(self) -> None:
        self._holders: dict[bytes, dict[str, Promise]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, instance: str, keys: bytes, ready_at: float) -> None:
        for key in iter_keys(keys):
            holders = self._holders.setdefault(key, {})
            promise = holders.get(instance)
            if promise:
                promise.count += 1
            else:
                holders[instance] = Promise(1, ready_at)

    def remove(self, instance: str, keys: bytes) -> None:
        """Undoes one ``add`` of the same instance and keys."""
        for key in iter_keys(keys):
            holders = self._holders[key]
            promise = holders[instance]
            promise.count -= 1
            if not promise.count:
                del holders[instance]
            if not holders:
                del self._holders[key]

    def match(self, keys: bytes) -> dict[str, tuple[int, float]]:
        """instance -> (blocks of ``keys`` promised there, when they are ready)."""
        first = self._holders.get(keys[:KEY]) if self._holders else None
        return {instance: self._longest(keys, instance) for instance in first} if first else {}

    def _longest(self, keys: bytes, instance: str) -> tuple[int, float]:
        absent = bisect_left(range(key_count(keys)), True, key=lambda i: self._promise(keys, i, instance) is None)
        promise = self._promise(keys, absent - 1, instance)
        return absent, promise.ready_at if promise else 0.0

    def _promise(self, keys: bytes, index: int, instance: str) -> Promise | None:
        holders = self._holders.get(keys[index * KEY : (index + 1) * KEY])
        return holders.get(instance) if holders else None
