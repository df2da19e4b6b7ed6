"""How much of the pool is promised to whom: admission is a reservation of bytes, not of memory. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.errors import DoesNotFit, NoRoom
from shared.instance.attempts import Key


@dataclass
class Room:
    """Blocks promised per attempt. Of ``total`` blocks the part ``headroom`` is never promised."""

    total: int
    block_size: int
    headroom: float = 0.0
    _promised: dict[Key, int] = field(default_factory=dict)

    @property
    def promised(self) -> int:
        return sum(self._promised.values())

    @property
    def limit(self) -> int:
        return max(1, int(self.total * (1 - self.headroom)))

    @property
    def free(self) -> int:
        """Blocks that may still be promised."""
        return max(0, self.limit - self.promised)

    def promise(self, key: Key, prompt: int, expected: int) -> int:
        """Keep room for ``prompt`` and ``expected`` output tokens; the blocks promised. Idempotent.

        Raises DoesNotFit when the prompt and one block of output exceed the empty pool, NoRoom when there is none now.
        """
        if key in self._promised:
            return self._promised[key]
        least, wanted = self._blocks(prompt + 1), self._blocks(prompt + expected)
        if least > self.limit:
            raise DoesNotFit(f"{least} blocks, the pool promises at most {self.limit}")
        blocks = min(wanted, self.limit)
        if blocks > self.free:
            raise NoRoom(f"{blocks} blocks wanted, {self.free} may be promised")
        self._promised[key] = blocks
        return blocks

    def grow(self, key: Key, blocks: int) -> None:
        """The attempt holds ``blocks`` by now: where that exceeds its promise, the promise follows."""
        if key in self._promised:
            self._promised[key] = max(self._promised[key], blocks)

    def release(self, key: Key) -> None:
        """Idempotent."""
        self._promised.pop(key, None)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)
