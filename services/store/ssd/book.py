"""What lies where in the segments, and what goes first when they are full. Pure.

A segment belongs to one namespace, whose blocks have one size. Within a namespace the least recently used block goes
first; between namespaces a whole segment does. What is being read or written stays where it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from services.store.ssd.journal import Entry, Live, Op
from services.store.ssd.owners import Owners
from services.store.tenants import Quotas

Name = tuple[bytes, bytes]
"""(namespace, key)"""


@dataclass(slots=True, eq=False)
class Block:
    """A block on the SSD, of ``tenant`` (a tag). ``readers`` keep its place from being written over, also after it was
    dropped (``gone``)."""

    namespace: bytes
    key: bytes
    parent: bytes
    length: int
    checksum: int
    segment: int
    slot: int
    tenant: int = 0
    used: int = 0
    readers: int = 0
    gone: bool = False

    @property
    def name(self) -> Name:
        return self.namespace, self.key


@dataclass
class Segment:
    """``slots`` places of ``stride`` bytes. ``busy`` counts reads and writes under way. ``used``: its latest use."""

    id: int
    namespace: bytes
    stride: int
    slots: int
    free: list[int]
    blocks: dict[int, Block] = field(default_factory=dict)
    busy: int = 0
    used: int = 0

    @property
    def size(self) -> int:
        return self.slots * self.stride


@dataclass
class Placement:
    """A place for a block that is not written yet. ``before`` goes into the log before its first byte, ``put`` (with
    the checksum filled in) after its last. ``made`` and ``removed`` are segments; ``left`` are blocks that made way."""

    block: Block
    put: Entry
    before: list[Entry] = field(default_factory=list)
    made: list[Segment] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    left: list[Name] = field(default_factory=list)


class Book:
    """``capacity`` bytes in segments of about ``segment_bytes``. What its methods give for the log goes there in that
    order, but for a placement's ``put``. Whoever places keeps to the quotas of ``owners``."""

    def __init__(self, capacity: int, segment_bytes: int, quotas: Quotas | None = None) -> None:
        self.segments: dict[int, Segment] = {}
        self.capacity = capacity
        self.owners = Owners(quotas or Quotas())
        self._segment_bytes = segment_bytes
        self._spaces: dict[bytes, OrderedDict[bytes, Block]] = {}
        self._writing: dict[Name, Placement] = {}
        self._clock = 0
        self._next_segment = 0

    def __len__(self) -> int:
        return sum(map(len, self._spaces.values()))

    @property
    def size(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in self.segments.values())

    def room(self, stride: int) -> int:
        """Blocks of ``stride`` bytes in an otherwise empty tier."""
        slots = max(1, self._segment_bytes // stride)
        return self.capacity // (slots * stride) * slots

    def live(self) -> Live:
        """What a log should say of it, the least recently used first."""
        segments = [self._entry(Op.SEGMENT, s.id, s.slots, s.stride, s.namespace) for s in self.segments.values()]
        blocks = sorted((b for space in self._spaces.values() for b in space.values()), key=lambda b: b.used)
        return Live([*segments, *map(self._put_entry, blocks)], segment=self._next_segment - 1)

    def load(self, live: Live) -> None:
        """Take over what a log left, the empty book's only beginning."""
        self._next_segment = live.segment + 1
        for e in live.entries:
            if e.op is Op.SEGMENT:
                self._add(Segment(e.segment, e.namespace, e.length, e.slot, []))
            else:
                block = Block(e.namespace, e.key, e.parent, e.length, e.checksum, e.segment, e.slot, e.tenant)
                self._count(block, 1)
                self._enter(block)
        for segment in self.segments.values():
            segment.free = [slot for slot in range(segment.slots - 1, -1, -1) if slot not in segment.blocks]

    # -- looking -----------------------------------------------------------------------------------------------

    def find(self, namespace: bytes, key: bytes) -> Block | None:
        space = self._spaces.get(namespace)
        return None if space is None else space.get(key)

    def writing(self, namespace: bytes, key: bytes) -> bool:
        return (namespace, key) in self._writing

    def blocks(self, namespace: bytes) -> Iterator[Block]:
        """The least recently used first."""
        space = self._spaces.get(namespace)
        return iter(() if space is None else space.values())

    def names(self) -> list[Name]:
        """Of all blocks, those that are being written too."""
        return [*self._writing, *self._written()]

    def _written(self) -> list[Name]:
        return [(namespace, key) for namespace, space in self._spaces.items() for key in space]

    def touch(self, namespace: bytes, key: bytes) -> None:
        block = self.find(namespace, key)
        if block is not None:
            self._spaces[namespace].move_to_end(key)
            self.owners.touched(block)
            self._use(block)

    def _use(self, block: Block) -> None:
        self._clock += 1
        block.used = self.segments[block.segment].used = self._clock

    # -- reading -----------------------------------------------------------------------------------------------

    def pin(self, block: Block) -> None:
        block.readers += 1
        self.segments[block.segment].busy += 1

    def unpin(self, block: Block) -> None:
        segment = self.segments[block.segment]
        block.readers -= 1
        segment.busy -= 1
        if block.gone and not block.readers:
            segment.free.append(block.slot)

    # -- writing -----------------------------------------------------------------------------------------------

    def place(
        self, namespace: bytes, stride: int, key: bytes, parent: bytes, length: int, tenant: int = 0
    ) -> Placement | None:
        """A place for a block that is neither here nor being written. None when everything is in use."""
        out = Placement(Block(namespace, key, parent, length, 0, -1, -1, tenant), Entry(Op.PUT, -1))
        segment = self._with_room(namespace, stride, out)
        if segment is None:
            return None
        slot = segment.free.pop()
        segment.busy += 1
        out.block.segment, out.block.slot = segment.id, slot
        out.put = self._put_entry(out.block)
        self._writing[namespace, key] = out
        self._count(out.block, 1)
        return out

    def written(self, placement: Placement, checksum: int) -> bool:
        """Its bytes and its entry are in the files. False when it was dropped meanwhile: :meth:`abandon` it."""
        block = placement.block
        if block.gone:
            return False
        self._end(placement)
        block.checksum = checksum
        self._enter(block)
        return True

    def abandon(self, placement: Placement) -> Entry:
        """It will not be written, or is not wanted any more. The entry must go into the log where ``put`` did."""
        block = placement.block
        self._end(placement)
        self._count(block, -1)
        self.segments[block.segment].free.append(block.slot)
        return self._drop_entry(block)

    def _end(self, placement: Placement) -> None:
        block = placement.block
        del self._writing[block.namespace, block.key]
        self.segments[block.segment].busy -= 1

    def drop(self, namespace: bytes, key: bytes) -> Entry | None:
        """Not found from now on. None when there is nothing for the log to say."""
        writing = self._writing.get((namespace, key))
        if writing is not None:
            writing.block.gone = True
        block = self.find(namespace, key)
        return None if block is None else self._drop(block)

    def _drop(self, block: Block) -> Entry:
        segment = self.segments[block.segment]
        self._leave(block)
        del segment.blocks[block.slot]
        block.gone = True
        if not block.readers:
            segment.free.append(block.slot)
        return self._drop_entry(block)

    def limit(self) -> None:
        """There is no room for more segments than there are."""
        self.capacity = min(self.capacity, self.size)

    def discard(self, segment: int) -> list[Name]:
        """A segment whose file is not there: nothing in it is. For one that is not in use."""
        for block in self.segments[segment].blocks.values():
            block.gone = True
            self._leave(block)
        lost = self.segments.pop(segment)
        return [(block.namespace, block.key) for block in lost.blocks.values()]

    # -- room --------------------------------------------------------------------------------------------------

    def _with_room(self, namespace: bytes, stride: int, out: Placement) -> Segment | None:
        free = self._free(namespace)
        if free is not None:
            return free
        slots = max(1, self._segment_bytes // stride)
        oldest = next((b for b in self.blocks(namespace) if not b.readers), None)
        other = self._oldest_of_others(namespace)
        while self.size + slots * stride > self.capacity:
            if other is None or (oldest is not None and other.used >= oldest.used):
                return self._make_way(oldest, out)
            self._remove(other, out)
            other = self._oldest_of_others(namespace)
        return self._make(namespace, stride, slots, out)

    def _free(self, namespace: bytes) -> Segment | None:
        mine = (s for s in self.segments.values() if s.free and s.namespace == namespace)
        return next(mine, None)

    def _make_way(self, oldest: Block | None, out: Placement) -> Segment | None:
        if oldest is None:
            return None
        out.left.append((oldest.namespace, oldest.key))
        out.before.append(self._drop(oldest))
        return self.segments[oldest.segment]

    def _oldest_of_others(self, namespace: bytes) -> Segment | None:
        others = (s for s in self.segments.values() if s.namespace != namespace and not s.busy)
        return min(others, key=lambda s: s.used, default=None)

    def _remove(self, segment: Segment, out: Placement) -> None:
        out.left += self.discard(segment.id)
        out.removed.append(segment.id)
        out.before.append(self._entry(Op.GONE, segment.id, 0, 0, segment.namespace))

    def _make(self, namespace: bytes, stride: int, slots: int, out: Placement) -> Segment:
        segment = Segment(self._next_segment, namespace, stride, slots, list(range(slots - 1, -1, -1)))
        self._next_segment += 1
        self._add(segment)
        out.made.append(segment)
        out.before.append(self._entry(Op.SEGMENT, segment.id, slots, stride, namespace))
        return segment

    def _add(self, segment: Segment) -> None:
        self.segments[segment.id] = segment
        self._spaces.setdefault(segment.namespace, OrderedDict())

    def _count(self, block: Block, sign: int) -> None:
        self.owners.quotas.add(block.tenant, sign * self.segments[block.segment].stride)

    def _leave(self, block: Block) -> None:
        del self._spaces[block.namespace][block.key]
        self._count(block, -1)
        self.owners.left(block)

    def _enter(self, block: Block) -> None:
        self._spaces[block.namespace][block.key] = block
        self.owners.entered(block)
        self.segments[block.segment].blocks[block.slot] = block
        self._use(block)

    # -- entries -----------------------------------------------------------------------------------------------

    def _put_entry(self, b: Block) -> Entry:
        return Entry(Op.PUT, b.segment, b.slot, b.length, b.checksum, b.namespace, b.key, b.parent, tenant=b.tenant)

    def _drop_entry(self, block: Block) -> Entry:
        return self._entry(Op.DROP, block.segment, block.slot, 0, block.namespace, block.key)

    @staticmethod
    def _entry(
        op: Op,
        segment: int,
        slot: int,
        length: int,
        namespace: bytes,
        key: bytes = bytes(16),
    ) -> Entry:
        return Entry(op, segment, slot, length, 0, namespace, key)


def trimmed(live: Live, segments: Iterable[int]) -> Live:
    """Only what lies in these segments."""
    kept = frozenset(segments)
    return Live([e for e in live.entries if e.segment in kept], live.bad, live.segment)
