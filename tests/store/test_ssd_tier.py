"""Agents with an SSD tier on real files: what leaves DRAM comes back, and what the disk does to it is found out."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import runpy
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from services.store.agent import Agent, run_agent
from services.store.client import StoreClient
from services.store.directory import Board, LocalDirectory
from services.store.memory import stride_of
from services.store.settings import StoreSettings
from services.store.ssd.journal import ENTRY
from shared.blocks import Namespace
from shared.engines.base import Owner, PoolClass
from shared.index import DRAM, SSD
from shared.telemetry import REGISTRY

NAMESPACE = Namespace(
    model="ab", weights="cd", tokenizer="ef", dtype="float32", layers=4, kv_heads=2, head_dim=16, block_size=16
)
SLOT, STRIDE = NAMESPACE.geometry.slot_bytes, stride_of(NAMESPACE.geometry)
OWNER = Owner("request/1")
Start = Callable[..., Awaitable[Agent]]


def count(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"mooncake_store_ssd_{name}", labels) or 0.0


def key_of(number: int) -> bytes:
    return number.to_bytes(2, "big") * 8


def content_of(number: int) -> bytes:
    return random.Random(number).randbytes(SLOT - number % 3)


def items(numbers: Sequence[int]) -> list[tuple[bytes, bytes]]:
    return [(key_of(i), content_of(i)) for i in numbers]


@pytest.fixture
async def stack() -> Any:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def board() -> Board:
    return Board()


@pytest.fixture
def start(stack: AsyncExitStack, tmp_path: Path, board: Board) -> Start:
    """``await start(slots=16, on=stack, ssd_bytes=..., ...)``."""

    async def start(slots: int = 16, on: AsyncExitStack = stack, **options: Any) -> Agent:
        defaults: dict[str, Any] = {"ssd_path": str(tmp_path / "ssd"), "ssd_bytes": 128 * STRIDE, "ssd_ahead": 0.5}
        options = defaults | options
        settings = StoreSettings(socket="@test-" + uuid4().hex, pool_bytes=slots * STRIDE, **options)
        return await on.enter_async_context(run_agent(settings, LocalDirectory(board)))

    return start


async def client_of(agent: Agent, stack: AsyncExitStack, namespace: Namespace = NAMESPACE) -> StoreClient:
    return await stack.enter_async_context(await StoreClient.connect(agent.settings.socket, namespace))


async def written(agent: Agent, blocks: int) -> None:
    """Wait until so many blocks are on the SSD, and nothing is on its way there."""
    async with asyncio.timeout(10):
        while len(agent.ssd.book) < blocks or agent.ssd.writes:
            agent.ssd.look()
            await asyncio.sleep(0.01)


async def put_slowly(agent: Agent, client: StoreClient, numbers: Sequence[int]) -> None:
    """Four at a time, so that the disk keeps up."""
    for at in range(0, len(numbers), 4):
        assert all(put.stored for put in await client.put(items(numbers[at : at + 4])))
        async with asyncio.timeout(10):
            agent.ssd.look()
            while agent.ssd.writes:
                await asyncio.sleep(0.005)


def tiers(agent: Agent) -> dict[bytes, int]:
    directory = agent.directory
    assert isinstance(directory, LocalDirectory)
    return directory.tiers


async def test_c6_a_working_set_of_four_times_the_memory_is_all_there(start: Start, stack: AsyncExitStack) -> None:
    agent = await start()
    client = await client_of(agent, stack)
    await put_slowly(agent, client, range(64))
    await written(agent, 56)
    before = count("read_blocks_total")
    for at in range(0, 64, 4):
        assert await client.get([key_of(i) for i in range(at, at + 4)]) == [content_of(i) for i in range(at, at + 4)]
    assert count("read_blocks_total") - before >= 48
    assert await client.contains([key_of(i) for i in range(64)]) == [True] * 64
    assert len(tiers(agent)) == 64
    for i in range(64):
        slab = next(iter(agent.slabs.values()))
        assert tiers(agent)[key_of(i)] == (SSD if slab.pool.find(key_of(i)) is None else DRAM)


async def test_c6_blocks_come_back_with_a_new_agent(start: Start, stack: AsyncExitStack) -> None:
    async with AsyncExitStack() as first:
        agent = await start(on=first)
        await put_slowly(agent, await client_of(agent, first), range(40))
        await written(agent, 32)
        there = [i for i in range(40) if agent.ssd.book.find(NAMESPACE.root(), key_of(i))]
    again = await start()
    client = await client_of(again, stack)
    assert tiers(again) == {key_of(i): SSD for i in there}
    for i in there:
        assert await client.get([key_of(i)]) == [content_of(i)]
    assert [
        k for k, there in zip(range(40), await client.contains(list(map(key_of, range(40)))), strict=True) if there
    ] == there


async def test_objects_of_all_sizes_come_back(start: Start, stack: AsyncExitStack) -> None:
    sizes = [1, 4095, 4096, 4097, 9000, SLOT - 1, SLOT, SLOT, 5000, SLOT, SLOT, 1] * 4
    data = [random.Random(i).randbytes(size) for i, size in enumerate(sizes)]
    async with AsyncExitStack() as first:
        agent = await start(on=first)
        client = await client_of(agent, first)
        for i in range(len(sizes)):
            await client.put([(key_of(i), data[i])])
            agent.ssd.look()
        await written(agent, 40)
        there = [i for i in range(len(sizes)) if agent.ssd.book.find(NAMESPACE.root(), key_of(i))]
    client = await client_of(await start(slots=64), stack)
    assert await client.get([key_of(i) for i in there]) == [data[i] for i in there]


async def test_a_peer_reads_what_is_on_the_ssd_alone(start: Start, stack: AsyncExitStack) -> None:
    agent, other = await start(verify="always"), await start(ssd_path="", ssd_bytes=0, slots=64)
    client, reader = await client_of(agent, stack), await client_of(other, stack)
    await put_slowly(agent, client, range(32))
    await written(agent, 24)
    fetched = await reader.fetch([key_of(i) for i in range(4)], b"", [], OWNER, PoolClass.PREFILL, 5.0, chained=False)
    assert [(f.error, f.bytes) for f in fetched] == [("", len(content_of(i))) for i in range(4)]
    for at in range(0, 32, 4):
        assert await reader.get([key_of(i) for i in range(at, at + 4)]) == [content_of(i) for i in range(at, at + 4)]


async def test_a_lease_brings_a_block_once_whoever_asks(start: Start, stack: AsyncExitStack) -> None:
    agent = await start()
    clients = [await client_of(agent, stack) for _ in range(4)]
    await put_slowly(agent, clients[0], range(32))
    await written(agent, 24)
    before = count("read_blocks_total")
    leases = await asyncio.gather(*(c.lease([key_of(0), key_of(1), key_of(99)], OWNER) for c in clients))
    assert [[h is not None for h in lease] for lease in leases] == [[True, True, False]] * 4
    assert len({lease[0].slot for lease in leases if lease[0]}) == 1
    assert count("read_blocks_total") - before == 2
    for client, lease in zip(clients, leases, strict=True):
        await client.release([h for h in lease if h])
    assert agent.stats()["store_holds"] == 0 and agent.stats()["store_prefetched"] == 0


async def test_prefetch_takes_no_more_than_its_share(start: Start, stack: AsyncExitStack) -> None:
    agent = await start(prefetch_share=0.25)
    client = await client_of(agent, stack)
    await put_slowly(agent, client, range(32))
    await written(agent, 24)
    leases = await client.lease([key_of(i) for i in range(12)], OWNER, PoolClass.PREFETCH)
    assert [h is not None for h in leases] == [True] * 4 + [False] * 8
    await client.release([h for h in leases if h])


async def test_a_removed_block_stays_removed(start: Start, stack: AsyncExitStack) -> None:
    async with AsyncExitStack() as first:
        agent = await start(on=first)
        client = await client_of(agent, first)
        await put_slowly(agent, client, range(32))
        await written(agent, 24)
        assert await client.remove([key_of(0), key_of(31), key_of(99)]) == [True, True, False]
        assert await client.get([key_of(0), key_of(31)]) == [None, None]
        assert key_of(0) not in tiers(agent)
    client = await client_of(await start(), stack)
    assert await client.get([key_of(0), key_of(31)]) == [None, None]


async def test_a_full_tier_lets_the_least_recently_used_go(start: Start, stack: AsyncExitStack) -> None:
    agent = await start(ssd_bytes=32 * STRIDE)
    client = await client_of(agent, stack)
    await put_slowly(agent, client, range(200))
    await written(agent, 32)
    assert agent.ssd.book.size == 32 * STRIDE
    for i in (*range(160, 200), 0):
        assert await client.get([key_of(i)]) in ([content_of(i)], [None])
    assert await client.get([key_of(199)]) == [content_of(199)] and await client.get([key_of(0)]) == [None]
    assert sum(f.stat().st_size for f in Path(agent.settings.ssd_path).glob("segment-*")) == 32 * STRIDE


async def test_what_the_disk_does_not_take_in_time_is_dropped_and_counted(start: Start, stack: AsyncExitStack) -> None:
    agent = await start()
    client = await client_of(agent, stack)
    before = count("skipped_blocks_total")
    await client.put(items(range(160)))
    assert count("skipped_blocks_total") > before
    assert len(tiers(agent)) <= 16 + len(agent.ssd.book) + agent.ssd.writes
    for i in range(160):
        assert await client.get([key_of(i)]) in ([content_of(i)], [None])


# -- what happens to the files ---------------------------------------------------------------------------------


async def filled(start: Start) -> list[int]:
    """A folder of an agent that has ended. Returns which blocks it holds."""
    async with AsyncExitStack() as first:
        agent = await start(on=first)
        await put_slowly(agent, await client_of(agent, first), range(40))
        await written(agent, 32)
        return [i for i in range(40) if agent.ssd.book.find(NAMESPACE.root(), key_of(i))]


async def what_is_left(agent: Agent, stack: AsyncExitStack, numbers: Sequence[int]) -> list[int]:
    """Asserts that nothing comes back wrong, and that the index knows what does not."""
    client, left = await client_of(agent, stack), []
    for i in numbers:
        (data,) = await client.get([key_of(i)])
        assert data in (content_of(i), None)
        assert (key_of(i) in tiers(agent)) == (data is not None)
        left += [] if data is None else [i]
    return left


@pytest.mark.parametrize("seed", range(4))
async def test_c6_flipped_bits(start: Start, stack: AsyncExitStack, tmp_path: Path, seed: int) -> None:
    there, rng = await filled(start), random.Random(seed)
    files = sorted((tmp_path / "ssd").glob("segment-*"))
    for path in rng.sample(files, 3):
        data = bytearray(path.read_bytes())
        data[rng.randrange(SLOT - 10)] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    before = count("lost_blocks_total", reason="checksum")
    left = await what_is_left(await start(), stack, there)
    lost = len(there) - len(left)
    assert 0 < lost <= 3 and count("lost_blocks_total", reason="checksum") - before == lost


async def test_c6_a_missing_file(start: Start, stack: AsyncExitStack, tmp_path: Path) -> None:
    there = await filled(start)
    paths = sorted((tmp_path / "ssd").glob("segment-*"))
    paths[0].unlink()
    os.truncate(paths[1], 5000)
    before = count("lost_blocks_total", reason="missing")
    left = await what_is_left(await start(), stack, there)
    assert len(left) < len(there) and count("lost_blocks_total", reason="missing") - before == len(there) - len(left)


@pytest.mark.parametrize("cut", [1, 50, 1000])
async def test_c6_a_torn_log(start: Start, stack: AsyncExitStack, tmp_path: Path, cut: int) -> None:
    there, log = await filled(start), tmp_path / "ssd" / "blocks.log"
    os.truncate(log, log.stat().st_size - cut)
    left = await what_is_left(await start(), stack, there)
    assert 0 < len(left) < len(there)


async def test_c6_a_log_that_is_none(start: Start, stack: AsyncExitStack, tmp_path: Path) -> None:
    there, log = await filled(start), tmp_path / "ssd" / "blocks.log"
    log.write_bytes(os.urandom(log.stat().st_size))
    before = count("lost_blocks_total", reason="log")
    agent = await start()
    assert await what_is_left(agent, stack, there) == []
    assert count("lost_blocks_total", reason="log") > before and agent.ssd.on
    assert not list((tmp_path / "ssd").glob("segment-*"))


async def test_another_deployments_blocks_are_not_found(start: Start, stack: AsyncExitStack) -> None:
    there = await filled(start)
    agent = await start(slab_bytes=16 * STRIDE, slots=64)
    other = await client_of(
        agent, stack, Namespace(**{f: getattr(NAMESPACE, f) for f in NAMESPACE.__struct_fields__} | {"head_dim": 8})
    )
    assert await other.get([key_of(i) for i in there]) == [None] * len(there)
    assert len(await what_is_left(agent, stack, there)) == len(there)


async def test_two_agents_do_not_share_a_folder(start: Start, stack: AsyncExitStack) -> None:
    first, second = await start(), await start()
    assert (first.ssd.state, second.ssd.state) == ("on", "in_use")
    client = await client_of(second, stack)
    await client.put(items(range(4)))
    assert await client.get([key_of(i) for i in range(4)]) == [content_of(i) for i in range(4)]
    assert count("state", state="in_use") == 1 and count("state", state="on") == 0


@contextmanager
def immutable(folder: Path) -> Iterator[None]:
    """Nothing can be made or removed in it, by root neither."""
    folder.mkdir(exist_ok=True)
    if os.geteuid():
        folder.chmod(0o500)
    elif subprocess.run(["chattr", "+i", str(folder)], capture_output=True, check=False).returncode:
        pytest.skip("the file system knows no immutable folders")
    try:
        yield
    finally:
        folder.chmod(0o700) if os.geteuid() else subprocess.run(["chattr", "-i", str(folder)], check=True)


async def test_a_folder_that_cannot_be_written(start: Start, stack: AsyncExitStack, tmp_path: Path) -> None:
    with immutable(tmp_path / "ssd"):
        agent = await start()
        assert agent.ssd.state == "unwritable"
        client = await client_of(agent, stack)
        await client.put(items(range(40)))
        assert await client.get([key_of(39), key_of(0)]) == [content_of(39), None]


async def test_a_folder_made_read_only_under_load(start: Start, stack: AsyncExitStack, tmp_path: Path) -> None:
    agent = await start()
    client = await client_of(agent, stack)
    await put_slowly(agent, client, range(20))
    await written(agent, 8)
    with immutable(tmp_path / "ssd"):
        await put_slowly(agent, client, range(20, 100))
        assert agent.ssd.state == "full"  # goes on with the files that are there
        for i in range(100):
            assert await client.get([key_of(i)]) in ([content_of(i)], [None])


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process grows beyond ``size`` bytes: as a full disk would have it."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system of a given size takes root to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize(("size", "state"), [("1m", "no_space"), ("5m", "full")])
async def test_c6_a_full_disk(stack: AsyncExitStack, start: Start, tmp_path: Path, size: str, state: str) -> None:
    stack.enter_context(small_disk(tmp_path / "ssd", size))
    agent = await start(ssd_bytes=64 << 20)  # segments of 2 MiB
    client = await client_of(agent, stack)
    await put_slowly(agent, client, range(400))
    assert agent.ssd.state == state
    for i in range(400):
        assert await client.get([key_of(i)]) in ([content_of(i)], [None])
    assert await client.get([key_of(399)]) == [content_of(399)]
    slab = next(iter(agent.slabs.values()))
    for key in tiers(agent):  # the index knows what is gone
        assert slab.contains([key]) == [True]


async def test_a_log_that_cannot_grow_ends_the_tier(start: Start, stack: AsyncExitStack, tmp_path: Path) -> None:
    agent = await start()
    client = await client_of(agent, stack)
    await put_slowly(agent, client, range(20))
    await written(agent, 8)
    log = (tmp_path / "ssd" / "blocks.log").stat().st_size
    with file_size_limit(max(log + 50, STRIDE * 4)):
        await put_slowly(agent, client, range(20, 600))
    assert agent.ssd.state == "no_space"
    for i in (0, 599):
        assert await client.get([key_of(i)]) in ([content_of(i)], [None])
    slab = next(iter(agent.slabs.values()))
    assert all(slab.contains([key]) == [True] for key in tiers(agent))


@pytest.mark.parametrize("lines", [6, 23, 60])
async def test_c6_killed_during_demotion(start: Start, stack: AsyncExitStack, tmp_path: Path, lines: int) -> None:
    script = Path(__file__).with_name("ssd_process.py")
    with subprocess.Popen([sys.executable, str(script), str(tmp_path / "ssd")], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        blocks = [int(process.stdout.readline()) for _ in range(lines)]
        process.send_signal(signal.SIGKILL)
    its = runpy.run_path(str(script))
    wrong = count("lost_blocks_total", reason="checksum")
    agent = await start()
    client, found = await client_of(agent, stack), 0
    for number in range(8 * lines + 64):
        (data,) = await client.get([its["key_of"](number)])
        assert data in (its["content_of"](number), None)
        found += data is not None
    assert found >= min(blocks[-1], 96) - 32
    assert count("lost_blocks_total", reason="checksum") == wrong


async def test_the_log_stays_small(
    start: Start, stack: AsyncExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.store.ssd.files.COMPACT_OVER", 50)
    async with AsyncExitStack() as first:
        agent = await start(on=first, ssd_bytes=32 * STRIDE)
        await put_slowly(agent, await client_of(agent, first), range(300))
        await written(agent, 32)
        there = [i for i in range(300) if agent.ssd.book.find(NAMESPACE.root(), key_of(i))]
    assert (tmp_path / "ssd" / "blocks.log").stat().st_size < 300 * ENTRY
    assert await what_is_left(await start(ssd_bytes=32 * STRIDE), stack, there) == there


async def test_every_block_that_was_not_removed_is_somewhere_or_counted(start: Start, stack: AsyncExitStack) -> None:
    agent = await start(slots=8)
    client = await client_of(agent, stack)
    before = count("skipped_blocks_total")
    for at in range(0, 96, 8):
        assert all(put.stored for put in await client.put(items(range(at, at + 8))))
    await written(agent, 0)
    there = await client.contains([key_of(i) for i in range(96)])
    assert there.count(False) == count("skipped_blocks_total") - before
    assert {key for key in map(key_of, range(96)) if key in tiers(agent)} == {
        key_of(i) for i, here in enumerate(there) if here
    }


async def test_a_smaller_tier_keeps_what_fits(start: Start, stack: AsyncExitStack, tmp_path: Path) -> None:
    there = await filled(start)
    left = await what_is_left(await start(ssd_bytes=16 * STRIDE), stack, there)
    assert 0 < len(left) <= 16
    assert sum(f.stat().st_size for f in (tmp_path / "ssd").glob("segment-*")) <= 16 * STRIDE


async def test_a_file_that_shrinks_under_a_running_agent(start: Start, stack: AsyncExitStack, tmp_path: Path) -> None:
    agent = await start()
    client = await client_of(agent, stack)
    await put_slowly(agent, client, range(40))
    await written(agent, 32)
    before = count("lost_blocks_total", reason="io")
    os.truncate(sorted((tmp_path / "ssd").glob("segment-*"))[0], STRIDE)
    got = [(await client.get([key_of(i)]))[0] for i in range(40)]
    assert all(data in (content_of(i), None) for i, data in enumerate(got))
    assert count("lost_blocks_total", reason="io") - before == got.count(None) == 3
    assert agent.ssd.on


async def test_a_block_that_changed_in_memory_is_not_written(start: Start, stack: AsyncExitStack) -> None:
    agent = await start()
    client = await client_of(agent, stack)
    await client.put(items(range(4)))
    slab = next(iter(agent.slabs.values()))
    await slab.checksums.ready(range(4))
    slot = slab.pool.find(key_of(1))
    assert slot is not None
    pool = np.memmap(client.pool.path, np.uint8, "r+", client.pool.offset, (client.pool.slots, client.pool.stride))
    pool[slot, 100] ^= 1
    await put_slowly(agent, client, range(4, 40))
    await written(agent, 20)
    assert await client.get([key_of(i) for i in range(4)]) == [content_of(0), None, content_of(2), content_of(3)]
    assert key_of(1) not in tiers(agent)


async def test_a_block_removed_on_its_way_up_does_not_come_back(start: Start, stack: AsyncExitStack) -> None:
    agent = await start()
    client = await client_of(agent, stack)
    await put_slowly(agent, client, range(40))
    await written(agent, 32)
    for i in range(0, 16, 2):
        keys = [key_of(i), key_of(i + 1)]
        leasing = asyncio.create_task(client.lease(keys, OWNER))
        await asyncio.sleep(0.0005 * i)
        removed = await client.remove(keys)
        held = [h for h in await leasing if h is not None]
        await client.release(held)
        assert removed == [True, True]
        assert await client.contains(keys) == [False, False]
        assert not {*keys} & tiers(agent).keys()
