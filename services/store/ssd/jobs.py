"""A job of the SSD tier's threads: blocks on their way to the disk, or one on its way back. Blocking."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TypeVar

from services.store.checksums import checksum
from services.store.memory import ALIGN
from services.store.slab import Slab
from services.store.ssd.book import Block, Placement, Segment
from services.store.ssd.files import Files
from services.store.ssd.journal import Entry
from shared.errors import StaleGeneration
from shared.telemetry import log

logger = log("store.ssd")

RUN_BYTES = 4 << 20
RUN_BLOCKS = 64
"""What one system call moves at most."""

T = TypeVar("T")


class NoSegment(OSError):
    """There is no room for another segment; nothing was written."""


@dataclass(frozen=True)
class Write:
    """One block on its way from ``slot`` of ``slab``, as it was in ``generation``, to its place."""

    slab: Slab
    slot: int
    generation: int
    checksum: int | None
    placement: Placement


@dataclass(frozen=True)
class Return:
    """One block on its way back, into a slot that is being written."""

    block: Block
    slab: Slab
    slot: int


@dataclass
class Job:
    """``before`` goes into the log first."""

    before: list[Entry]
    writes: list[Write] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(w.placement.block.length for w in self.writes)

    @property
    def removals(self) -> list[Entry]:
        """Of ``before``, what is not there to make way for the writes."""
        way = {entry for w in self.writes for entry in w.placement.before}
        return [entry for entry in self.before if entry not in way]

    @property
    def made(self) -> list[Segment]:
        return [segment for w in self.writes for segment in w.placement.made]

    @property
    def removed(self) -> list[int]:
        return [segment for w in self.writes for segment in w.placement.removed]


@dataclass(frozen=True)
class Written:
    """``checksum`` None: not written, since the slot was reused or (``corrupt``) has other bytes than at its commit."""

    checksum: int | None
    corrupt: bool = False


def run(files: Files, job: Job) -> list[tuple[Write, Written]]:
    """Entries of what makes way are in the log before its bytes are written over, entries of what is new after its
    bytes are there. Raises NoSegment before anything has changed."""
    _create(files, job.made)
    files.append(job.before)
    for segment in job.removed:
        files.remove(segment)
    parts = runs(job.writes, lambda w: w.placement.block, _stride)
    both = [pair for part in parts for pair in zip(part, _write_run(files, part), strict=True)]
    files.append([replace(w.placement.put, checksum=d.checksum) for w, d in both if d.checksum is not None])
    files.compact()
    return both


def _create(files: Files, made: Sequence[Segment]) -> None:
    created: list[int] = []
    try:
        for segment in made:
            files.create(segment.id, segment.size)
            created.append(segment.id)
    except OSError as e:
        for id in created:
            files.remove(id)
        raise NoSegment(e.errno, e.strerror, e.filename) from e


def _write_run(files: Files, run: Sequence[Write]) -> list[Written]:
    """Pinned: the slots get no other bytes meanwhile, evicted or not."""
    with ExitStack() as pins:
        done = [_check(pins, w) for w in run]
        good = [w for w, d in zip(run, done, strict=True) if d.checksum is not None]
        for part in runs(good, lambda w: w.placement.block, _stride):
            _write(files, part)
    return done


def _check(pins: ExitStack, w: Write) -> Written:
    try:
        pins.enter_context(w.slab.pins.pin(w.slot, w.generation))
    except StaleGeneration:
        return Written(None)
    with w.slab.memory.range(w.slot, w.placement.block.length) as data:
        found = checksum(data)
    return Written(found) if w.checksum in (None, found) else Written(None, corrupt=True)


def _stride(w: Write) -> int:
    return w.slab.memory.stride


def _write(files: Files, part: Sequence[Write]) -> None:
    first = part[0].placement.block
    with ExitStack() as views:
        data = [views.enter_context(w.slab.memory.range(w.slot, pages(w.placement.block.length))) for w in part]
        files.write(first.segment, first.slot * _stride(part[0]), data)


def bring(files: Files, run: Sequence[Return]) -> list[str]:
    """Blocks' bytes into slots that are being written. Returns why not: io or checksum; else an empty string."""
    try:
        _read(files, run)
    except (OSError, KeyError) as e:
        if len(run) > 1:  # one bad page does not cost its neighbours
            return [bring(files, [one])[0] for one in run]
        logger.warning("block not read from the SSD", error=str(e))
        return ["io"]
    return [_verify(one) for one in run]


def _read(files: Files, run: Sequence[Return]) -> None:
    first = run[0].block
    with ExitStack() as views:
        into = [views.enter_context(r.slab.memory.range(r.slot, pages(r.block.length))) for r in run]
        files.read(first.segment, first.slot * run[0].slab.memory.stride, into)


def _verify(one: Return) -> str:
    with one.slab.memory.range(one.slot, one.block.length) as data:
        return "" if checksum(data) == one.block.checksum else "checksum"


def runs(items: Iterable[T], block: Callable[[T], Block], stride: Callable[[T], int]) -> list[list[T]]:
    """Those that lie behind each other without a gap, to be moved at once: a small block alone costs as much time as
    eight. Sorted by place."""
    out: list[list[T]] = []
    size, end = 0, (-1, -1)
    for item in sorted(items, key=lambda item: (block(item).segment, block(item).slot)):
        b, step = block(item), stride(item)
        if (b.segment, b.slot) != end or size + step > RUN_BYTES or len(out[-1]) >= RUN_BLOCKS:
            out.append([])
            size = 0
        out[-1].append(item)
        size += step
        end = (b.segment, b.slot + 1) if pages(b.length) == step else (-1, -1)
    return out


def pages(length: int) -> int:
    """Bytes of the whole pages that ``length`` bytes take: what O_DIRECT moves."""
    return -(-length // ALIGN) * ALIGN
