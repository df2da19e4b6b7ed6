"""A set of blocks of bounded size that forgets the least recently used, and takes copies in its middle. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator


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

    def touch(self, blocks: Iterable[int]) -> list[int]:
        """Make them the youngest, the last one most; those that are new."""
        young, old, half = self._young, self._old, self.capacity / 2
        new = list[int]()
        for block in blocks:
            if block in young:
                young.move_to_end(block)
                continue
            if block in old:
                del old[block]
            else:
                new.append(block)
            young[block] = None
            if len(young) > half:
                old[young.popitem(last=False)[0]] = None
        return new

    def insert_middle(self, blocks: Iterable[int]) -> list[int]:
        """Put new ones between the halves; those that are new. What is here stays where it is."""
        new = [block for block in blocks if block not in self]
        self._old.update(dict.fromkeys(new))
        return new

    def victim(self) -> int:
        """Take out the oldest."""
        half = self._old or self._young
        return half.popitem(last=False)[0]

    def remove(self, blocks: Iterable[int]) -> None:
        """Those that are here."""
        if self._young or self._old:
            for block in blocks:
                if self._young.pop(block, self) is self:
                    self._old.pop(block, None)

    def clear(self) -> None:
        self._young.clear()
        self._old.clear()
