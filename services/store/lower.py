"""What lies below a slab's DRAM, as the slab and its services see it: nothing, or a space on the SSD."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from services.store.sources import Disk
from shared.engines.base import Owner, PoolClass

if TYPE_CHECKING:
    from services.store.reader import Read, Wanted


class Lower(Protocol):
    """Lives on the agent's event loop and keeps it waiting for no disk."""

    def holds(self, key: bytes) -> bool:
        """Could be read now."""

    def left(self, keys: Sequence[bytes]) -> list[bytes]:
        """These have left DRAM. Returns those that are nowhere any more; of the others the index is told."""

    def remove(self, key: bytes) -> bool:
        """Not found from now on. Was it here?"""

    def changed(self) -> None:
        """Slots were taken or evicted."""

    def ready(self, most: int) -> int:
        """How many of the next ``most`` victims can go without being lost."""

    def sizes(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        """Bytes of each block that could be read now."""

    def disk(self) -> Disk:
        """How fast that would be."""

    async def read(self, wanted: Sequence[Wanted], owner: Owner, pool_class: PoolClass, timeout: float) -> Read | None:
        """Bring what is here of ``wanted`` into DRAM, verified. What is not here is not in the outcomes; None: nothing
        is. The holds that come with it are the agent's own."""

    def end(self) -> None:
        """The slab has made way. What lies below it stays, until its namespace comes back."""


class NothingLower:
    """Blocks that leave DRAM are gone."""

    def holds(self, key: bytes) -> bool:
        return False

    def left(self, keys: Sequence[bytes]) -> list[bytes]:
        return list(keys)

    def remove(self, key: bytes) -> bool:
        return False

    def changed(self) -> None:
        return None

    def ready(self, most: int) -> int:
        return most

    def sizes(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        return {}

    def disk(self) -> Disk:
        return Disk()

    async def read(self, wanted: Sequence[Wanted], owner: Owner, pool_class: PoolClass, timeout: float) -> Read | None:
        return None

    def end(self) -> None:
        return None
