"""A set of blocks of bounded size that forgets the least recently used, and takes copies in its middle. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class Lru:
    """Two halves of one list: ``young`` (touched) and ``old``, from whose oldest end victims are taken.

    ``capacity``: blocks. Nothing is evicted by itself: :meth:`victim` says what goes while :attr:`over` is true.
    """

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self._young: OrderedDict[int, None] = OrderedDict()
        self._old: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def __contains__(self, block: int) -> bool:
        return block in self._young or block in self._old

    def __iter__(self) -> Iterator[int]:
        """Oldest first."""
        yield from self._old
        yield from self._young

    @property
    def over(self) -> bool:
        return len(self._young) + len(self._old) > self.capacity

    def touch(self, block: int) -> bool:
        """Make it the youngest; True where it is new."""
        young = self._young
        if block in young:
            young.move_to_end(block)
            return False
        known = self._old.pop(block, self) is None
        young[block] = None
        if len(young) > self.capacity / 2:
            self._old[young.popitem(last=False)[0]] = None
        return not known

    def insert_middle(self, block: int) -> bool:
        """Put a new one between the halves; True where it is new. One that is here stays where it is."""
        if block in self:
            return False
        self._old[block] = None
        return True

    def victim(self) -> int:
        """Take out the oldest."""
        half = self._old or self._young
        return half.popitem(last=False)[0]

    def spare(self, block: int) -> None:
        """A victim that is in use goes back, as one that was just used."""
        self.touch(block)

    def remove(self, block: int) -> None:
        if self._young.pop(block, self) is self:
            self._old.pop(block, None)

    def clear(self) -> None:
        self._young.clear()
        self._old.clear()
