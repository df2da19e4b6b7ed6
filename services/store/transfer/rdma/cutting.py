"""From a job to what is posted for it: bounds checked, no piece over the end of a memory region. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from services.store.transfer.base import Op
from services.store.transfer.batches import Job, Slice
from services.store.transfer.rdma.cargo import Cargo
from services.store.transfer.rdma.reach import Reach
from services.store.transfer.topology.slices import borders_in, cut, merge_borders, slice_size
from services.store.transfer.wire import Kind, SegmentRef
from shared.errors import OutOfRange


def size_of(job: Job, queued: int, windows: Iterable[int]) -> int:
    """Bytes of a slice of ``job``, about, with ``queued`` bytes under way. ``windows``: bytes of READs that may fly on
    each NIC here; two slices fill the smallest one."""
    windows = list(windows)
    size = slice_size(job.length, queued, max(2, len(windows)))
    return size if job.request.op is Op.WRITE else min(size, *(window // 2 for window in windows))


def cargos_of(job: Job, here: Reach, there: Reach, size: int) -> list[Cargo]:
    """``size``: bytes of a slice, about. Requests of the job that leave the peer's segment are refused, the others are
    under way from here on; where none is left, the job ends now."""
    request = job.request
    good = min(job.count, max(0, there.size - request.offset) // job.step)
    for number in range(good, job.count):
        end = f"{there.name} of {there.size} bytes"
        at = request.offset + number * job.step
        job.refused[number] = OutOfRange(f"[{at}, {at}+{job.step}) is not a range inside {end}")
    pieces = _pieces(job, here, there, good * job.step, size)
    job.transport, job.open = "rdma", len(pieces)
    if not pieces:
        job.finish()
    kind = Kind.READ if request.op is Op.READ else Kind.WRITE
    target = SegmentRef(request.segment, there.instance)
    cargos = []
    for at, length in pieces:
        local, remote = here.at(request.local_offset + at, length), there.at(request.offset + at, length)
        cargos.append(Cargo(Slice(job, kind, at, length, target), there, local, remote, length))
    return cargos


def _pieces(job: Job, here: Reach, there: Reach, length: int, size: int) -> list[tuple[int, int]]:
    """(offset, length) of each slice of the job's first ``length`` bytes. What is read is cut inside a block, too,
    where that is larger than ``size``: a device's window of READs counts bytes."""
    if not length:
        return []
    borders = merge_borders(
        borders_in(job.request.local_offset, length, here.starts), borders_in(job.request.offset, length, there.starts)
    )
    if job.request.op is Op.READ and size < job.step < length:
        borders = merge_borders(
            borders, [at + inner for at in range(0, length, job.step) for inner, _ in cut(job.step, size)]
        )
    return cut(length, size, job.step, borders)
