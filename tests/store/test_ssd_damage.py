"""What the disk does to an SSD tier is found out, dropped and counted; nothing comes back wrong and DRAM goes on."""

from __future__ import annotations

import os
import random
import resource
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.store.ssd_tools import (
    SLOT,
    STRIDE,
    Start,
    begun,
    client_of,
    content_of,
    count,
    filled,
    items,
    key_of,
    put_slowly,
    tiers,
    what_is_left,
    written,
)

KILLS = 4


@pytest.fixture(autouse=True)
def long_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """What went off stays off for the length of a test."""
    monkeypatch.setattr("services.store.ssd.rest.FIRST", 1000.0)


@pytest.mark.parametrize("seed", range(4))
async def test_c6_flipped_bits(start_ssd: Start, stack: AsyncExitStack, tmp_path: Path, seed: int) -> None:
    there, rng = await filled(start_ssd), random.Random(seed)
    files = sorted((tmp_path / "ssd").glob("segment-*"))
    for path in rng.sample(files, 3):
        data = bytearray(path.read_bytes())
        data[rng.randrange(SLOT - 10)] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    before = count("lost_blocks_total", reason="checksum")
    left = await what_is_left(await start_ssd(), stack, there)
    lost = len(there) - len(left)
    assert 0 < lost <= 3 and count("lost_blocks_total", reason="checksum") - before == lost


async def test_c6_a_missing_file(start_ssd: Start, stack: AsyncExitStack, tmp_path: Path) -> None:
    there = await filled(start_ssd)
    paths = sorted((tmp_path / "ssd").glob("segment-*"))
    paths[0].unlink()
    os.truncate(paths[1], 5000)
    before = count("lost_blocks_total", reason="missing")
    left = await what_is_left(await start_ssd(), stack, there)
    assert len(left) < len(there) and count("lost_blocks_total", reason="missing") - before == len(there) - len(left)


@pytest.mark.parametrize("cut", [1, 50, 1000])
async def test_c6_a_torn_log(start_ssd: Start, stack: AsyncExitStack, tmp_path: Path, cut: int) -> None:
    there, log = await filled(start_ssd), tmp_path / "ssd" / "blocks.log"
    os.truncate(log, log.stat().st_size - cut)
    left = await what_is_left(await start_ssd(), stack, there)
    assert 0 < len(left) < len(there)


async def test_c6_a_log_that_is_none(start_ssd: Start, stack: AsyncExitStack, tmp_path: Path) -> None:
    there, log = await filled(start_ssd), tmp_path / "ssd" / "blocks.log"
    log.write_bytes(os.urandom(log.stat().st_size))
    before = count("lost_blocks_total", reason="log")
    agent = await start_ssd()
    assert await what_is_left(agent, stack, there) == []
    assert count("lost_blocks_total", reason="log") > before and agent.ssd.on
    assert not list((tmp_path / "ssd").glob("segment-*"))


async def test_two_agents_do_not_share_a_folder(start_ssd: Start, stack: AsyncExitStack) -> None:
    first, second = await start_ssd(), await start_ssd()
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


async def test_a_folder_that_cannot_be_written(start_ssd: Start, stack: AsyncExitStack, tmp_path: Path) -> None:
    with immutable(tmp_path / "ssd"):
        agent = await start_ssd()
        assert agent.ssd.state == "unwritable"
        client = await client_of(agent, stack)
        await client.put(items(range(40)))
        assert await client.get([key_of(39), key_of(0)]) == [content_of(39), None]


async def test_a_folder_made_read_only_under_load(start_ssd: Start, stack: AsyncExitStack, tmp_path: Path) -> None:
    agent, client = await begun(start_ssd, stack, 20)
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
async def test_c6_a_full_disk(stack: AsyncExitStack, start_ssd: Start, tmp_path: Path, size: str, state: str) -> None:
    stack.enter_context(small_disk(tmp_path / "ssd", size))
    agent = await start_ssd(ssd_bytes=64 << 20)  # segments of 2 MiB
    client = await client_of(agent, stack)
    await put_slowly(agent, client, range(400))
    assert agent.ssd.state == state
    for i in range(400):
        assert await client.get([key_of(i)]) in ([content_of(i)], [None])
    assert await client.get([key_of(399)]) == [content_of(399)]
    slab = next(iter(agent.slabs.values()))
    for key in tiers(agent):  # the index knows what is gone
        assert slab.contains([key]) == [True]


async def test_a_log_that_cannot_grow_ends_the_tier(start_ssd: Start, stack: AsyncExitStack, tmp_path: Path) -> None:
    agent, client = await begun(start_ssd, stack, 20)
    log = (tmp_path / "ssd" / "blocks.log").stat().st_size
    with file_size_limit(max(log + 50, STRIDE * 4)):
        await put_slowly(agent, client, range(20, 600))
    assert agent.ssd.state == "no_space"
    for i in (0, 599):
        assert await client.get([key_of(i)]) in ([content_of(i)], [None])
    slab = next(iter(agent.slabs.values()))
    assert all(slab.contains([key]) == [True] for key in tiers(agent))


@pytest.mark.parametrize("lines", [6, 23, 60])
async def test_c6_killed_during_demotion(start_ssd: Start, stack: AsyncExitStack, tmp_path: Path, lines: int) -> None:
    script = Path(__file__).with_name("ssd_process.py")
    with subprocess.Popen([sys.executable, str(script), str(tmp_path / "ssd")], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        blocks = [int(process.stdout.readline()) for _ in range(lines)]
        process.send_signal(signal.SIGKILL)
    its = runpy.run_path(str(script))
    wrong = count("lost_blocks_total", reason="checksum")
    agent = await start_ssd()
    client, found = await client_of(agent, stack), 0
    for number in range(8 * lines + 64):
        (data,) = await client.get([its["key_of"](number)])
        assert data in (its["content_of"](number), None)
        found += data is not None
    assert found >= min(blocks[-1], 96) - 32
    assert count("lost_blocks_total", reason="checksum") == wrong


@pytest.mark.timeout(400)
async def test_c6_killed_again_and_again(start_ssd: Start, stack: AsyncExitStack, tmp_path: Path) -> None:
    """Each agent takes over what the one before left, writes over some of it and is killed at any moment."""
    script, rng = Path(__file__).with_name("ssd_process.py"), random.Random(4)
    put: list[range] = []
    blocks = [0]
    for turn in range(KILLS):
        first, lines = 1000 * turn, rng.randrange(4, 16)
        command = [sys.executable, str(script), str(tmp_path / "ssd"), str(first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            blocks = [int(process.stdout.readline()) for _ in range(lines)]
            process.send_signal(signal.SIGKILL)
        put.append(range(first, first + 8 * lines + 64))
    its = runpy.run_path(str(script))
    wrong = count("lost_blocks_total", reason="checksum"), count("lost_blocks_total", reason="log")
    agent = await start_ssd()
    client, found = await client_of(agent, stack), 0
    for number in (number for numbers in put for number in numbers):
        (data,) = await client.get([its["key_of"](number)])
        assert data in (its["content_of"](number), None)
        found += data is not None
    assert found >= min(blocks[-1], 96) - 32
    assert (count("lost_blocks_total", reason="checksum"), count("lost_blocks_total", reason="log")) == wrong


async def test_a_file_that_shrinks_while_it_is_used(start_ssd: Start, stack: AsyncExitStack, tmp_path: Path) -> None:
    agent, client = await begun(start_ssd, stack)
    before = count("lost_blocks_total", reason="io")
    os.truncate(sorted((tmp_path / "ssd").glob("segment-*"))[0], STRIDE)
    got = [(await client.get([key_of(i)]))[0] for i in range(40)]
    assert all(data in (content_of(i), None) for i, data in enumerate(got))
    assert count("lost_blocks_total", reason="io") - before == got.count(None) == 3
    assert agent.ssd.on


async def test_a_block_that_changed_in_memory_is_not_written(start_ssd: Start, stack: AsyncExitStack) -> None:
    agent = await start_ssd()
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
