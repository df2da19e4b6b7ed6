"""What each tenant has in the cache, and whose blocks go when one has too much: its own, never others'. Pure.

A block belongs to the tenant of the request that committed it here. Tenants with different salts share no block.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml

from services.store.eviction import COMPACT, EvictionOrder, Rank
from shared.engines.base import PoolClass
from shared.errors import ConfigError, QuotaExceeded
from shared.setting import parse_bytes

OTHER = "other"
"""In metrics, all tenants that have no quota of their own."""


class Quotas:
    """Bytes of committed blocks in DRAM, over all slabs of an agent. ``default``: for each tenant that has a name and
    is not in ``named``; 0: no limit."""

    def __init__(self, default: int = 0, named: Mapping[str, int] | None = None) -> None:
        self.named = dict(named or {})
        self.used: dict[str, int] = {}
        self.over: set[str] = set()
        self._default = default

    def limit(self, tenant: str) -> int:
        """0: none."""
        return self.named.get(tenant, self._default if tenant else 0)

    def add(self, tenant: str, size: int) -> None:
        used = self.used[tenant] = self.used.get(tenant, 0) + size
        if not used:
            del self.used[tenant]
        limit = self.limit(tenant)
        if limit and used > limit:
            self.over.add(tenant)
        else:
            self.over.discard(tenant)

    def shown(self) -> dict[str, int]:
        """Bytes by label: tenants of ``named``, and ``OTHER``."""
        shown = dict.fromkeys([*self.named, OTHER], 0)
        for tenant, used in self.used.items():
            shown[tenant if tenant in self.named else OTHER] += used
        return shown


class Tenants:
    """Of one slab, with slots of ``stride`` bytes: whose each block is, and each limited tenant's own order."""

    def __init__(self, quotas: Quotas, stride: int, order: EvictionOrder) -> None:
        self._quotas = quotas
        self._stride = stride
        self._order = order
        self._of: dict[int, str] = {}
        self._heaps: dict[str, list[Rank]] = {}

    def excess(self, tenant: str, more: int = 0) -> int:
        """Slots that must go for the tenant to have ``more`` within its quota."""
        limit = self._quotas.limit(tenant)
        over = self._quotas.used.get(tenant, 0) + more * self._stride - limit if limit else 0
        return max(0, -(-over // self._stride))

    def check(self, tenant: str, count: int, pool_class: PoolClass) -> None:
        """Raises QuotaExceeded for what the tenant could not even have alone. What a running request needs is not
        refused: it goes when the request has ended."""
        limit = self._quotas.limit(tenant)
        if limit and pool_class >= PoolClass.PREFETCH and count * self._stride > limit:
            raise QuotaExceeded(f"{count * self._stride} bytes; tenant {tenant} has at most {limit}", field="tenant")

    def refusal(self, tenant: str) -> QuotaExceeded:
        used, limit = self._quotas.used.get(tenant, 0), self._quotas.limit(tenant)
        return QuotaExceeded(f"tenant {tenant} has {used} of {limit} bytes, all in use or pinned", field="tenant")

    @property
    def over(self) -> list[str]:
        """Tenants with more than their quota."""
        return list(self._quotas.over)

    def published(self, slot: int, tenant: str) -> None:
        self._of[slot] = tenant
        self._quotas.add(tenant, self._stride)

    def forgotten(self, slot: int) -> None:
        tenant = self._of.pop(slot)
        self._quotas.add(tenant, -self._stride)
        if not self._quotas.used.get(tenant):
            self._heaps.pop(tenant, None)

    def push(self, slot: int) -> None:
        """It may have become a candidate."""
        tenant = self._of.get(slot, "")
        if not self._quotas.limit(tenant):
            return
        heap = self._heaps.setdefault(tenant, [])
        heapq.heappush(heap, self._order.rank(slot))
        if len(heap) > COMPACT * len(self._order.stamps):
            heap[:] = [entry for entry in set(heap) if self._order.rank(entry[2]) == entry]
            heapq.heapify(heap)

    def pop(self, tenant: str, is_candidate: Callable[[int], bool]) -> int | None:
        """The tenant's next block to go."""
        heap = self._heaps.get(tenant, [])
        while heap:
            entry = heapq.heappop(heap)
            slot = entry[2]
            if self._order.rank(slot) == entry and self._of.get(slot) == tenant and is_candidate(slot):
                return slot
        return None


def read_quotas(path: str) -> dict[str, int]:
    """A YAML file, a size by tenant: ``acme: 20GiB``. 0: no limit. Raises ConfigError."""
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise ConfigError(f"tenant_quotas: {path} cannot be read: {e}", field="tenant_quotas") from e
    if not isinstance(found, dict):
        raise ConfigError(f"tenant_quotas: {path} is no mapping of tenants to sizes", field="tenant_quotas")
    return {str(tenant): _size(path, tenant, value) for tenant, value in found.items()}


def _size(path: str, tenant: object, value: object) -> int:
    try:
        if isinstance(value, bool):
            raise ValueError(f"{value} is no size")
        return parse_bytes(str(value))
    except ValueError as e:
        raise ConfigError(f"tenant_quotas: {path}: {tenant}: {e}", field="tenant_quotas") from None
