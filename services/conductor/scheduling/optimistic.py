"""Blocks that an instance does not have yet but will: those of accepted requests still in its queue."""

from __future__ import annotations

from dataclasses import dataclass

from shared.blocks import KEY, iter_keys, key_count


@dataclass(slots=True)
class Promise:
    count: int
    ready_at: float


NOBODY: dict[str, Promise] = {}


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
        """instance -> (blocks of ``keys`` promised there, when they are ready).

        All instances bisect together, after a look at the second block: where many prompts begin alike, most are
        promised their first block only.
        """
        first = self._holders.get(keys[:KEY]) if self._holders else None
        if not first:
            return {}
        found: dict[str, tuple[int, float]] = dict.fromkeys(first, (0, 0.0))
        open_ranges = [(0, key_count(keys), first, list(first))]
        while open_ranges:
            at, absent, holders, instances = open_ranges.pop()
            if absent - at == 1:
                found.update({instance: (absent, holders[instance].ready_at) for instance in instances})
                continue
            middle = (at + absent) // 2 if at else 1
            further = self._holders.get(keys[middle * KEY : (middle + 1) * KEY], NOBODY)
            longer = [instance for instance in instances if instance in further] if further else []
            if longer:
                open_ranges.append((middle, absent, further, longer))
            if len(longer) < len(instances):
                shorter = [instance for instance in instances if instance not in further] if longer else instances
                open_ranges.append((at, middle, holders, shorter))
        return found
