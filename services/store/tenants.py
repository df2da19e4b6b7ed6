"""What each tenant has in the cache, and whose blocks go when one has too much: its own, never others'. Pure.

A block belongs to the tenant of the request that committed it, here or at the agent that it was fetched from. Tenants
with different salts share no block.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import xxhash
import yaml

from services.store.eviction import COMPACT, EvictionOrder, Rank
from shared.engines.base import PoolClass
from shared.errors import ConfigError, QuotaExceeded
from shared.setting import parse_bytes

OTHER = "other"
"""In metrics, all tenants that have no quota of their own."""

NOBODY = 0
"""The tag of whoever has no tenant."""


@lru_cache(maxsize=1 << 16)
def tag_of(tenant: str) -> int:
    """What a tenant is called where names have no room: in the SSD's log, between agents, for each slot. 64 bits."""
    return xxhash.xxh3_64_intdigest(tenant.encode()) or 1 if tenant else NOBODY


class Quotas:
    """Bytes of blocks on one tier, over all slabs of an agent, by tag. ``default``: for each tenant that has a name and
    is not in ``named``; 0: no limit."""

    def __init__(self, default: int = 0, named: Mapping[str, int] | None = None) -> None:
        self.named = dict(named or {})
        self.used: dict[int, int] = {}
        self.writing: dict[int, int] = {}  # reserved for the cache and not committed yet
        self.over: set[int] = set()
        self._default = default
        self._limits = {tag_of(tenant): limit for tenant, limit in self.named.items()}

    def limit(self, tenant: int) -> int:
        """0: none."""
        return self._limits.get(tenant, self._default if tenant else 0)

    def excess(self, tenant: int, more: int = 0) -> int:
        """Bytes that must go for the tenant to have ``more`` within its quota."""
        limit = self.limit(tenant)
        return max(0, self.used.get(tenant, 0) + self.writing.get(tenant, 0) + more - limit) if limit else 0

    def reserve(self, tenant: int, size: int) -> None:
        """What is being written counts too, or many writers at once would take others' room."""
        self.writing[tenant] = self.writing.get(tenant, 0) + size
        if not self.writing[tenant]:
            del self.writing[tenant]

    def unused(self) -> Quotas:
        """The same limits, and nobody has anything."""
        return Quotas(self._default, self.named)

    def add(self, tenant: int, size: int) -> None:
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
        names = {tag_of(tenant): tenant for tenant in self.named}
        shown = dict.fromkeys([*self.named, OTHER], 0)
        for tenant, used in self.used.items():
            shown[names.get(tenant, OTHER)] += used
        return shown


class Tenants:
    """Of one slab, with slots of ``stride`` bytes: whose each block is, and each limited tenant's own order."""

    def __init__(self, quotas: Quotas, stride: int, order: EvictionOrder) -> None:
        self._quotas = quotas
        self._stride = stride
        self._order = order
        self._of: dict[int, int] = {}
        self._heaps: dict[int, list[Rank]] = {}

    def of(self, slot: int) -> int:
        """The tag of whose block it is."""
        return self._of.get(slot, NOBODY)

    def excess(self, tenant: int, more: int = 0) -> int:
        """Slots that must go for the tenant to have ``more`` within its quota."""
        return -(-self._quotas.excess(tenant, more * self._stride) // self._stride)

    def check(self, tenant: str, count: int, pool_class: PoolClass) -> None:
        """Raises QuotaExceeded for what the tenant could not even have alone. What a running request needs is not
        refused: it goes when the request has ended."""
        limit = self._quotas.limit(tag_of(tenant))
        if limit and pool_class >= PoolClass.PREFETCH and count * self._stride > limit:
            size = count * self._stride
            raise QuotaExceeded(f"{size} bytes; tenant {tenant} has at most {limit} in DRAM", field="tenant")

    def refusal(self, tenant: str) -> QuotaExceeded:
        tag = tag_of(tenant)
        used, limit = self._quotas.used.get(tag, 0) + self._quotas.writing.get(tag, 0), self._quotas.limit(tag)
        why = f"tenant {tenant} has {used} of {limit} bytes in DRAM, all being written, in use or pinned"
        return QuotaExceeded(why, field="tenant")

    def near(self, ahead: float) -> list[tuple[int, int]]:
        """Tenants with little left of their quota, and how many of their blocks are next to go for it: as many as
        ``ahead`` is of the quota, less what is left."""
        found = [(tenant, self._due(tenant, ahead)) for tenant in self._heaps]
        return [(tenant, count) for tenant, count in found if count > 0]

    def _due(self, tenant: int, ahead: float) -> int:
        limit, used = self._quotas.limit(tenant), self._quotas.used.get(tenant, 0)
        return max(1, int(ahead * limit) // self._stride) - max(0, (limit - used) // self._stride)

    @property
    def over(self) -> list[int]:
        """Tenants with more than their quota."""
        return list(self._quotas.over)

    def reserve(self, tenant: str, slots: int) -> None:
        """So many more slots are being written for the tenant's cache; negative: fewer."""
        self._quotas.reserve(tag_of(tenant), slots * self._stride)

    def published(self, slot: int, tenant: int) -> None:
        self._of[slot] = tenant
        self._quotas.add(tenant, self._stride)

    def forgotten(self, slot: int) -> None:
        tenant = self._of.pop(slot)
        self._quotas.add(tenant, -self._stride)
        if not self._quotas.used.get(tenant):
            self._heaps.pop(tenant, None)

    def push(self, slot: int) -> None:
        """It may have become a candidate."""
        tenant = self.of(slot)
        if not self._quotas.limit(tenant):
            return
        heap = self._heaps.setdefault(tenant, [])
        heapq.heappush(heap, self._order.rank(slot))
        if len(heap) > COMPACT * len(self._order.stamps):
            heap[:] = [entry for entry in set(heap) if self._order.rank(entry[2]) == entry]
            heapq.heapify(heap)

    def pop(self, tenant: int, is_candidate: Callable[[int], bool]) -> int | None:
        """The tenant's next block to go."""
        heap = self._heaps.get(tenant, [])
        while heap:
            entry = heapq.heappop(heap)
            slot = entry[2]
            if self._order.rank(slot) == entry and self._of.get(slot) == tenant and is_candidate(slot):
                return slot
        return None


@dataclass(frozen=True)
class Share:
    """What a tenant may have on each tier; 0: no limit, None: not said."""

    dram: int | None = None
    ssd: int | None = None


@dataclass(frozen=True)
class Shares:
    """``default``: for each tenant that has a name and is not in ``named``. Who has no share of the SSD named has the
    part of it that is its part of DRAM."""

    default: Share
    named: Mapping[str, Share]

    @staticmethod
    def read(path: str, default: Share) -> Shares:
        """``path`` "": nobody is named. Raises ConfigError."""
        return Shares(default, read_shares(path) if path else {})

    def dram(self) -> Quotas:
        return Quotas(self._dram(self.default), {name: self._dram(share) for name, share in self.named.items()})

    def ssd(self, dram_bytes: int, ssd_bytes: int) -> Quotas:
        """``dram_bytes``, ``ssd_bytes``: the tiers' sizes."""

        def limit(share: Share) -> int:
            said = share.ssd if share.ssd is not None else self.default.ssd
            return self._dram(share) * ssd_bytes // dram_bytes if said is None else said

        return Quotas(limit(self.default), {name: limit(share) for name, share in self.named.items()})

    def _dram(self, share: Share) -> int:
        return (self.default.dram or 0) if share.dram is None else share.dram


def read_shares(path: str) -> dict[str, Share]:
    """A YAML file, by tenant a size in DRAM, ``acme: 20GiB``, or one for each tier, ``acme: {dram: 20GiB, ssd: 1TiB}``.
    0: no limit. Raises ConfigError."""
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise ConfigError(f"tenant_quotas: {path} cannot be read: {e}", field="tenant_quotas") from e
    if not isinstance(found, dict):
        raise ConfigError(f"tenant_quotas: {path} is no mapping of tenants to sizes", field="tenant_quotas")
    try:
        return {str(tenant): _share(tenant, value) for tenant, value in found.items()}
    except ValueError as e:
        raise ConfigError(f"tenant_quotas: {path}: {e}", field="tenant_quotas") from None


def _share(tenant: object, value: object) -> Share:
    tiers = value if isinstance(value, dict) else {"dram": value}
    if unknown := sorted(str(tier) for tier in tiers.keys() - {"dram", "ssd"}):
        raise ValueError(f"{tenant}: {unknown[0]} is no tier; there are dram and ssd")
    return Share(**{tier: _size(tenant, size) for tier, size in tiers.items()})


def _size(tenant: object, value: object) -> int:
    if isinstance(value, bool):
        raise ValueError(f"{tenant}: {value} is no size")
    try:
        return parse_bytes(str(value))
    except ValueError as e:
        raise ValueError(f"{tenant}: {e}") from None
