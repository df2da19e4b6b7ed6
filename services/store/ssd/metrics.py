"""What the SSD tier counts. Names are ``mooncake_store_ssd_*``; label values are bounded."""

from __future__ import annotations

from shared.telemetry import counter, gauge

WRITTEN = counter("store_ssd_written_blocks", "Blocks written to the SSD.")
READ = counter("store_ssd_read_blocks", "Blocks brought back from the SSD, verified.")
WRITTEN_BYTES = counter("store_ssd_written_bytes", "Bytes of blocks written to the SSD.")
READ_BYTES = counter("store_ssd_read_bytes", "Bytes of blocks brought back from the SSD.")
RATE = gauge(
    "store_ssd_rate_bytes", "Bytes per second as last measured, 0: not yet. direction: read, write.", ("direction",)
)
RESTS = counter(
    "store_ssd_rests", "Times that the disk failed and was left alone for a while. reason: as state.", ("reason",)
)
SKIPPED = counter("store_ssd_skipped_blocks", "Blocks that left DRAM for good: the SSD had no copy in time.")
SPARED = counter("store_ssd_spared_blocks", "Blocks on the SSD that came from another agent's DRAM, which was quicker.")
LOST = counter(
    "store_ssd_lost_blocks",
    "Blocks on the SSD that could not be used. reason: log (entries that do not check), missing (no such file), "
    "checksum, io, off (the tier rests; they are back with it).",
    ("reason",),
)
BLOCKS = gauge("store_ssd_blocks", "Blocks on the SSD.")
BYTES = gauge("store_ssd_bytes", "Bytes of its segment files.")
DIRECT = gauge("store_ssd_direct", "1 where blocks go past the page cache (O_DIRECT).")
STATE = gauge(
    "store_ssd_state",
    "1 for what holds: on; full (no room for more segments, goes on with those it has); off, and why: unused (not "
    "configured), in_use (another agent has the folder), unwritable, no_space, io. What is off or full tries again.",
    ("state",),
)
STATES = ("on", "full", "unused", "in_use", "unwritable", "no_space", "io")


def show_state(state: str) -> None:
    for each in STATES:
        STATE.labels(each).set(each == state)
