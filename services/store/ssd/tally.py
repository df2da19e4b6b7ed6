"""What one SSD tier has done so far: for the mesh's picture of its agent, and in the process's metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.store.rates import Rate
from services.store.ssd import metrics


@dataclass
class Tally:
    """Blocks, but for the rates (bytes per second, 0.0: not yet known)."""

    written: int = 0
    read: int = 0
    skipped: int = 0
    lost: int = 0
    read_rate: Rate = field(default_factory=Rate)
    write_rate: Rate = field(default_factory=Rate)

    def wrote(self, sizes: list[int], seconds: float) -> None:
        self.written += len(sizes)
        metrics.WRITTEN.inc(len(sizes))
        metrics.WRITTEN_BYTES.inc(sum(sizes))
        self.write_rate.add(sum(sizes), seconds)
        metrics.RATE.labels("write").set(self.write_rate.value)

    def moved_up(self, size: int, seconds: float) -> None:
        """Bytes that were read, verified."""
        metrics.READ_BYTES.inc(size)
        self.read_rate.add(size, seconds)
        metrics.RATE.labels("read").set(self.read_rate.value)

    def hit(self) -> None:
        """A block is in DRAM again."""
        self.read += 1
        metrics.READ.inc()

    def skip(self) -> None:
        """A block left DRAM and there was no copy of it here."""
        self.skipped += 1
        metrics.SKIPPED.inc()

    def lose(self, reason: str, blocks: int = 1) -> None:
        self.lost += blocks
        metrics.LOST.labels(reason).inc(blocks)
