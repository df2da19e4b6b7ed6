"""Whose the blocks on the SSD are: what each tenant has there, and which of its own goes first. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from services.store.tenants import Quotas

if TYPE_CHECKING:
    from services.store.ssd.book import Block, Name


class Owners:
    """``quotas`` counts places, those being written too. Only tenants with a limit have an order of their own."""

    def __init__(self, quotas: Quotas) -> None:
        self.quotas = quotas
        self._orders: dict[int, OrderedDict[Name, Block]] = {}

    def entered(self, block: Block) -> None:
        if self.quotas.limit(block.tenant):
            self._orders.setdefault(block.tenant, OrderedDict())[block.name] = block

    def left(self, block: Block) -> None:
        if block.tenant in self._orders:
            del self._orders[block.tenant][block.name]

    def touched(self, block: Block) -> None:
        if block.tenant in self._orders:
            self._orders[block.tenant].move_to_end(block.name)

    def oldest(self, tenant: int) -> Block | None:
        """The least recently used one that nobody reads, of a tenant with a limit."""
        return next((b for b in self._orders.get(tenant, {}).values() if not b.readers), None)
