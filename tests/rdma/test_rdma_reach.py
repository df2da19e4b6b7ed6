"""What a peer says of its memory, the cut at region borders, addresses ranked: all without a device."""

from __future__ import annotations

import mmap
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.store.transfer.base import Op, Request
from services.store.transfer.batches import MERGED, Batch, Job
from services.store.transfer.ledger import Ledger
from services.store.transfer.rdma import verbs
from services.store.transfer.rdma.cutting import cargos_of, size_of
from services.store.transfer.rdma.gids import Gid, rank
from services.store.transfer.rdma.nic import SOFT_WINDOW, UNBOUNDED
from services.store.transfer.rdma.reach import Part, Reach, Table
from services.store.transfer.rdma.traffic import Traffic
from services.store.transfer.segments import Segment
from services.store.transfer.topology.matrix import Matrix, Tiers
from services.store.transfer.topology.paths import Nics, Paths
from services.store.transfer.topology.slices import slice_size
from shared.errors import OutOfRange, ProtocolError
from shared.messages import Ref

KIB = 1 << 10
MEMORY = memoryview(mmap.mmap(-1, 1 << 27))
"""Never touched: it takes none."""
BLOCKS = st.tuples(st.integers(1, MERGED), st.integers(1, 5)) | st.tuples(st.integers(1, 64 << 20), st.just(1))
"""(bytes of one, how many in a row)."""


def reach(sizes: list[int], base: int) -> Reach:
    """Regions of these sizes, each at an address that does not follow that of the one before."""
    parts, at = [], 0
    for number, size in enumerate(sizes):
        parts.append(Part(at, size, base + 2 * at + number, {"n": number}))
        at += size
    return Reach("pool", 1, at, "cpu:0", parts).verify()


def job_of(offset: int, local: int, step: int, count: int, op: Op = Op.READ) -> Job:
    batch = Batch(1, count, lambda job: None)
    segment = Segment("pool", MEMORY, "cpu:0")
    job = batch.add(Request(op, "pool", local, Ref("b", 1), "pool", offset, step), segment)
    for number in range(1, count):
        assert job.takes(Request(op, "pool", local + number * step, Ref("b", 1), "pool", offset + number * step, step))
    return job


@given(
    here=st.lists(st.integers(1, 300 * KIB), min_size=1, max_size=4),
    there=st.lists(st.integers(1, 300 * KIB), min_size=1, max_size=4),
    step=st.integers(1, 100 * KIB),
    count=st.integers(1, 5),
    offset=st.integers(0, 1000),
)
def test_cargos_cover_the_job_and_stay_inside_regions(
    here: list[int], there: list[int], step: int, count: int, offset: int
) -> None:
    ours, theirs = reach([*here, 1 << 20], 1 << 30), reach(there, 1 << 40)
    job = job_of(offset, 0, step, count)
    cargos = cargos_of(job, ours, theirs, 64 * KIB)
    good = [n for n in range(count) if offset + (n + 1) * step <= theirs.size]
    assert sorted(job.refused) == [n for n in range(count) if n not in good]
    assert all(isinstance(error, OutOfRange) for error in job.refused.values())
    assert job.open == len(cargos)
    at = 0
    for cargo in cargos:
        assert cargo.piece.offset == at
        assert cargo.local == ours.at(at, cargo.length) and cargo.remote == theirs.at(offset + at, cargo.length)
        at += cargo.length
    assert at == len(good) * step
    assert all(cargo.length <= 64 * KIB for cargo in cargos)  # of a READ, whatever a block is


@given(
    blocks=BLOCKS,
    queued=st.integers(0, 1 << 30),
    windows=st.lists(st.sampled_from([SOFT_WINDOW, 2 * SOFT_WINDOW, UNBOUNDED]), min_size=1, max_size=4),
)
def test_reads_are_cut_so_that_two_fly_within_a_window(
    blocks: tuple[int, int], queued: int, windows: list[int]
) -> None:
    """Blocks of any size, alone or in a row. One that fills a window would leave its NIC idle between two."""
    (step, count), whole = blocks, reach([1 << 30], 1 << 30)
    job = job_of(0, 0, step, count)
    cargos = cargos_of(job, whole, whole, size_of(job, queued, windows))
    assert sum(cargo.length for cargo in cargos) == step * count
    assert all(2 * cargo.length <= min(windows) for cargo in cargos)
    paths = Paths(Nics(Matrix({"cpu:0": Tiers(("h",))})), Nics(Matrix({"cpu:0": Tiers(("t",))})), Ref("b", 1))
    traffic = Traffic(paths, Ledger(), lambda cargo: ("cpu:0", "cpu:0"), lambda cargo: cargo.piece.settle())
    traffic.submit(cargos, 0.0)
    (lane,) = traffic.lanes.values()
    while lane.queue:
        taken = traffic.take(lane, 128, min(windows))
        assert lane.reading <= min(windows) and (len(taken) >= 2 or not lane.queue)
        traffic.completed(lane, lane.sent)
    assert job.moved == step * count


@given(blocks=BLOCKS, queued=st.integers(0, 1 << 30))
def test_writes_are_cut_without_regard_to_windows(blocks: tuple[int, int], queued: int) -> None:
    job = job_of(0, 0, *blocks, Op.WRITE)
    assert size_of(job, queued, [SOFT_WINDOW, UNBOUNDED]) == slice_size(job.length, queued, 2)


def test_a_reach_that_cannot_be_is_refused() -> None:
    part = Part(0, 100, 1 << 20, {"n": 1})
    table = Table(1 << 20, 1, 50, {"n": 1})
    for wrong in (
        Reach("pool", 1, 200, "cpu:0", [part]),
        Reach("pool", 1, 200, "cpu:0", [part, part]),
        Reach("pool", 1, 100, "cpu:0", [part], "table"),
        Reach("pool", 1, 100, "cpu:0", [part], "open", table),
        Reach("pool", 1, 100, "cpu:0", [part], "table", table),
        Reach("pool", 1, 100, "cpu:0", [part], "trust me"),
        Reach("pool", 1, 0, "cpu:0", [Part(0, 0, 1, {})]),
    ):
        with pytest.raises(ProtocolError):
            wrong.verify()


def test_addresses_are_ranked() -> None:
    """Routable RoCE v2 first, link-local last, whatever the table's order."""
    link_local = Gid(0, "fe80::5054:ff:fe12:3456", verbs.GID_ROCE_V2)
    v1 = Gid(1, "::ffff:10.77.0.1", verbs.GID_ROCE_V1)
    v2 = Gid(2, "::ffff:10.77.0.1", verbs.GID_ROCE_V2)
    v6 = Gid(3, "2001:db8::1", verbs.GID_ROCE_V2)
    nobody = Gid(4, "::", verbs.GID_ROCE_V2)
    assert rank([link_local, v1, v2, v6, nobody]) == [v2, v6, v1, link_local]
    assert str(v2) == "10.77.0.1 (RoCE v2, index 2)"


def test_pyverbs_of_another_python_is_named(tmp_path: Path) -> None:
    package = tmp_path / "pyverbs"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "device.cpython-27-x86_64-linux-gnu.so").touch()
    spec = PathFinder.find_spec("pyverbs", [str(tmp_path)])
    assert spec is not None
    assert "cpython-27" in verbs.unloadable(spec) and f"Python {sys.version_info.major}." in verbs.unloadable(spec)
