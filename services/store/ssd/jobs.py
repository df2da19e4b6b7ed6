"""A job of the SSD tier's threads: blocks on their way to the disk, or one on its way back. Blocking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from services.store.checksums import checksum
from services.store.memory import ALIGN
from services.store.slab import Slab
from services.store.ssd.book import Block, Placement, Segment
from services.store.ssd.files import Files
from services.store.ssd.journal import Entry
from shared.errors import StaleGeneration
from shared.telemetry import log

logger = log("store.ssd")


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


@dataclass
class Job:
    """``before`` goes into the log first."""

    before: list[Entry]
    writes: list[Write] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(w.placement.block.length for w in self.writes)

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


def run(files: Files, job: Job) -> list[Written]:
    """Entries of what makes way are in the log before its bytes are written over, entries of what is new after its
    bytes are there. Raises NoSegment before anything has changed."""
    _create(files, job.made)
    files.append(job.before)
    for segment in job.removed:
        files.remove(segment)
    done = [_write(files, w) for w in job.writes]
    both = zip(job.writes, done, strict=True)
    files.append([replace(w.placement.put, checksum=d.checksum) for w, d in both if d.checksum is not None])
    files.compact()
    return done


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


def _write(files: Files, w: Write) -> Written:
    """Pinned: the slot gets no other bytes meanwhile, evicted or not."""
    block = w.placement.block
    try:
        with w.slab.pins.pin(w.slot, w.generation):
            with w.slab.memory.range(w.slot, block.length) as data:
                found = checksum(data)
            if w.checksum not in (None, found):
                return Written(None, corrupt=True)
            with w.slab.memory.range(w.slot, pages(block.length)) as data:
                files.write(block.segment, block.slot * w.slab.memory.stride, data)
            return Written(found)
    except StaleGeneration:
        return Written(None)


def bring(files: Files, block: Block, slab: Slab, slot: int) -> str:
    """The block's bytes into a slot that is being written. Returns why not: io or checksum; else an empty string."""
    try:
        with slab.memory.range(slot, pages(block.length)) as into:
            files.read(block.segment, block.slot * slab.memory.stride, into)
    except (OSError, KeyError) as e:
        logger.warning("block not read from the SSD", error=str(e))
        return "io"
    with slab.memory.range(slot, block.length) as data:
        return "" if checksum(data) == block.checksum else "checksum"


def pages(length: int) -> int:
    """Bytes of the whole pages that ``length`` bytes take: what O_DIRECT moves."""
    return -(-length // ALIGN) * ALIGN
