"""What a store agent counts. Names are ``mooncake_store_*``; label values are bounded."""

from __future__ import annotations

from shared.telemetry import counter, gauge, held_gauge

TRANSFER_BYTES = counter(
    "store_transfer_bytes",
    "KV bytes moved, counted where the transfer was asked for. direction: in (fetched), out (streamed).",
    ("transport", "direction"),
)
FETCHED = counter("store_fetched_blocks", "Blocks fetched from other agents and committed here.")
FETCH_FAILED = counter("store_fetch_failed_blocks", "Blocks that a fetch did not bring.", ("reason",))
CORRUPT = counter("store_corrupt_blocks", "Blocks whose checksum was not that of their commit.", ("where",))
EVICTED = counter("store_evicted_blocks", "Blocks that left the pool for others.")
COMMITTED = counter("store_committed_blocks", "Blocks committed by the engines of this node.")
LOOKUPS = counter("store_lookup_blocks", "Blocks that engines asked for. result: hit (local), miss.", ("result",))
LEASED = counter("store_leased_blocks", "Blocks leased to other agents. result: hit, miss.", ("result",))
ABORTED = counter(
    "store_aborted_requests",
    "Requests that had to give way in the pool, by the class of who needed room.",
    ("room_for",),
)
REPLICAS = counter(
    "store_replicas",
    "Copies asked for by change_replica. result: made, failed, dropped, refused, short (blocks).",
    ("result",),
)
TENANT_BYTES = gauge(
    "store_tenant_bytes",
    "Slots of committed blocks. tenant: those with a quota of their own, other. tier: dram, ssd.",
    ("tenant", "tier"),
)
TENANT_QUOTA = gauge("store_tenant_quota_bytes", "What a tenant may have at most, 0: no limit.", ("tenant", "tier"))
SLOTS = gauge("store_slots", "Slots of the pool. state: free, cached (evictable), used.", ("state",))
HELD = {
    kind: held_gauge(kind)
    for kind in (
        "store_slots",
        "store_holds",
        "store_prefetched",
        "store_pinned",
        "store_leases",
        "store_landings",
        "store_quarantined",
        "store_connections",
        "store_orphans",
        "store_fetches",
        "store_streams",
        "store_waiting",
        "store_ssd_writes",
        "store_ssd_reads",
    )
}
"""``mooncake_held{kind}``. pinned: slots that hard pins keep. orphans: holds of connections that ended while their
process lives on (or is stopped)."""


def count_bytes(transport: str, direction: str, moved: int) -> None:
    if moved:
        TRANSFER_BYTES.labels(transport, direction).inc(moved)
