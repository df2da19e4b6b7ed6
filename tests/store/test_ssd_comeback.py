"""A disk that fails rests while DRAM goes on, and comes back with what it had: on real file systems of real errors."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from services.store.ssd.jobs import run
from tests.store.ssd_tools import (
    STRIDE,
    Start,
    begun,
    client_of,
    content_of,
    count,
    items,
    key_of,
    put_slowly,
    tiers,
    until,
    written,
)

SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN: from now on everything in this file system fails with EIO


@pytest.fixture(autouse=True)
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.store.ssd.rest.FIRST", 0.05)
    monkeypatch.setattr("services.store.ssd.rest.MOST", 0.2)


class Disk:
    """A file system of its own at ``folder``."""

    def __init__(self, image: Path, folder: Path) -> None:
        self.image, self.folder = image, folder

    def mount(self) -> bool:
        command = ["mount", "-o", "loop", str(self.image), str(self.folder)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", str(self.folder)], capture_output=True, check=False)

    def fail(self) -> None:
        fd = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", 0))
        except OSError as e:
            pytest.skip(f"the file system cannot be made to fail: {e}")
        finally:
            os.close(fd)

    def heal(self) -> None:
        """The same blocks, in a file system that works."""
        self.unmount()
        deadline = time.monotonic() + 100
        while not self.mount():
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path / "image", tmp_path / "ssd")
    disk.folder.mkdir()
    with disk.image.open("wb") as image:
        image.truncate(32 << 20)
    made = subprocess.run(["mkfs.ext4", "-q", "-F", str(disk.image)], capture_output=True, check=False).returncode == 0
    if os.geteuid() or not made or not disk.mount():
        pytest.skip("a file system of its own takes root, mkfs.ext4 and a loop device")
    try:
        yield disk
    finally:
        disk.unmount()


async def test_c6_a_disk_whose_writes_fail_rests_and_comes_back(
    disk: Disk, start_ssd: Start, stack: AsyncExitStack
) -> None:
    agent, client = await begun(start_ssd, stack)
    there = [i for i in range(40) if key_of(i) in tiers(agent)]
    before = count("rests_total", reason="io")

    disk.fail()
    await put_slowly(agent, client, range(40, 80))
    await until(agent, lambda: agent.ssd.state == "io" and count("rests_total", reason="io") > before + 1)
    assert await client.get([key_of(i) for i in range(76, 80)]) == [content_of(i) for i in range(76, 80)]
    slab = next(iter(agent.slabs.values()))
    assert all(slab.pool.find(key) is not None for key in tiers(agent))  # the index knows of DRAM alone

    disk.heal()
    await until(agent, lambda: agent.ssd.on and len(agent.ssd.book) >= 24)
    for i in there:
        assert await client.get([key_of(i)]) in ([content_of(i)], [None])
    assert await client.get([key_of(0)]) == [content_of(0)]
    await put_slowly(agent, client, range(80, 100))
    await written(agent, 40)
    assert await client.get([key_of(80)]) == [content_of(80)]


async def test_c6_a_disk_whose_reads_fail_rests(
    disk: Disk, start_ssd: Start, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, client = await begun(start_ssd, stack)
    disk.fail()
    lost = count("lost_blocks_total", reason="io")
    with monkeypatch.context() as patch:
        patch.setattr(agent.ssd, "look", lambda: None)  # nothing is written meanwhile
        assert await client.get([key_of(i) for i in range(12)]) == [None] * 12
        assert count("lost_blocks_total", reason="io") - lost == 8  # then nobody tries any more
        assert agent.ssd.state == "io"
        assert await client.get([key_of(39)]) == [content_of(39)]
        rests = count("rests_total", reason="io")
    await until(agent, lambda: count("rests_total", reason="io") > rests)  # tried again, and let go of the old files
    disk.heal()
    await until(agent, lambda: agent.ssd.on)
    assert await client.get([key_of(i) for i in range(12, 20)]) == [content_of(i) for i in range(12, 20)]
    for i in range(12):
        assert await client.get([key_of(i)]) in ([content_of(i)], [None])


async def test_a_full_disk_is_used_further_once_there_is_room(
    disk: Disk, start_ssd: Start, stack: AsyncExitStack
) -> None:
    agent = await start_ssd(ssd_bytes=64 << 20)  # segments of 2 MiB
    room = os.statvfs(disk.folder)
    ballast = disk.folder / "ballast"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_bsize - (7 << 20))
    client = await client_of(agent, stack)
    await put_slowly(agent, client, range(400))
    size = agent.ssd.book.size
    assert 0 < size < 16 << 20 and agent.ssd.state in ("full", "on")
    ballast.unlink()
    await until(agent, lambda: agent.ssd.state == "on")
    await put_slowly(agent, client, range(400, 800))
    assert agent.ssd.book.size > size


async def test_the_folder_is_taken_over_when_its_agent_has_ended(start_ssd: Start, stack: AsyncExitStack) -> None:
    async with AsyncExitStack() as first:
        owner = await start_ssd(on=first)
        await put_slowly(owner, await client_of(owner, first), range(40))
        await written(owner, 32)
        there = [i for i in range(40) if key_of(i) in tiers(owner)]
        heir = await start_ssd()
        client = await client_of(heir, stack)
        assert heir.ssd.state == "in_use"
    await until(heir, lambda: heir.ssd.on)
    await until(heir, lambda: {key_of(i) for i in there if key_of(i) in tiers(heir)} != set())
    assert await client.get([key_of(0)]) == [content_of(0)]


async def test_what_is_removed_while_the_disk_rests_stays_removed(
    disk: Disk, start_ssd: Start, stack: AsyncExitStack
) -> None:
    agent, client = await begun(start_ssd, stack)
    disk.fail()
    await client.remove([key_of(0)])  # for the log, which cannot be written any more
    await put_slowly(agent, client, range(40, 60))
    await until(agent, lambda: not agent.ssd.on)
    await client.remove([key_of(1)])
    rests = count("rests_total", reason="io")
    await until(agent, lambda: count("rests_total", reason="io") > rests)
    disk.heal()
    await until(agent, lambda: agent.ssd.on)
    assert await client.get([key_of(i) for i in range(3)]) == [None, None, content_of(2)]
    await until(agent, lambda: key_of(2) in tiers(agent))
    assert not {key_of(0), key_of(1)} & tiers(agent).keys()


async def test_a_disk_that_hangs_keeps_nobody_waiting(
    start_ssd: Start, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Injected at the seam to the files: a kernel that hangs cannot be had here."""
    goes_on = threading.Event()
    stack.callback(goes_on.set)
    agent = await start_ssd()
    client = await client_of(agent, stack)
    await put_slowly(agent, client, range(20))
    monkeypatch.setattr("services.store.ssd.writing.run", lambda files, job: goes_on.wait() and run(files, job))
    for at in range(20, 100, 8):
        assert all(put.stored for put in await client.put(items(range(at, at + 8))))
    assert await client.get([key_of(99)]) == [content_of(99)]
    goes_on.set()
    await written(agent, 8)


async def test_places_are_used_again(start_ssd: Start, stack: AsyncExitStack) -> None:
    """What was removed or pushed out leaves its place to others; files of another size of the tier go."""
    agent = await start_ssd()
    client = await client_of(agent, stack)
    for turn in range(6):
        numbers = range(100 * turn, 100 * turn + 40)
        await put_slowly(agent, client, numbers)
        await client.remove([key_of(i) for i in numbers])
    await put_slowly(agent, client, range(1000, 1040))
    await written(agent, 32)
    assert agent.ssd.book.size <= 64 * STRIDE
    folder = Path(agent.settings.ssd_path)
    assert sum(f.stat().st_blocks * 512 for f in folder.glob("segment-*")) == agent.ssd.book.size
