"""What an agent says of its RDMA devices: in its record, and as metrics of each."""

from __future__ import annotations

from services.store.transfer.rdma.metrics import NIC_PAIRS, NIC_QUEUED, NIC_RESTING
from services.store.transfer.rdma.nic import Nic
from services.store.transfer.topology.paths import Nic as Load
from shared.records import NicRecord


def record_of(nic: Nic, load: Load, up: bool, pairs: int, now: float) -> NicRecord:
    """``load``: what the paths know of it; ``up``: its port is; ``pairs``: queue pairs on it."""
    state = _state(nic, load, up, now)
    return NicRecord(
        name=nic.name,
        state=state,
        gid=str(nic.gid),
        mtu=128 << nic.mtu,
        pairs=pairs,
        queued=load.queued,
        read=nic.moved["read"],
        written=nic.moved["write"],
        broken=nic.broken,
        rest=round((load.rest.until or now) - now, 1) if state == "resting" else 0.0,
    )


def _state(nic: Nic, load: Load, up: bool, now: float) -> str:
    if nic.lost or nic.failed:
        return "lost"
    if not up:
        return "down"
    return "resting" if load.rest.resting(now) else "active"


def show(records: list[NicRecord]) -> None:
    """As metrics."""
    for record in records:
        NIC_RESTING.labels(record.name).set(record.state == "resting")
        NIC_PAIRS.labels(record.name).set(record.pairs)
        NIC_QUEUED.labels(record.name).set(record.queued)
