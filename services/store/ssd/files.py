"""The files of the SSD tier: segments, log and lock of one folder. Blocking: for threads, without the GIL."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from services.store.memory import ALIGN
from services.store.ssd.book import trimmed
from services.store.ssd.journal import ENTRY, HEADER, Codec, Entry, Live, Op, recover, rewrite
from shared.telemetry import log

logger = log("store.ssd")

LOG, NEW_LOG, LOCK = "blocks.log", "blocks.log.new", "lock"
SEGMENT = re.compile(r"segment-(\d{8,})\.blocks")

COMPACT_OVER = 4096
"""Entries that a log may have beyond twice what still holds in it."""

LOCK_PATIENCE = 2.0
"""Seconds in which an agent that is just ending may let go of the folder."""


class InUse(OSError):
    """Another agent has the folder."""


@dataclass(frozen=True)
class Found:
    """What the folder held. ``missing``: blocks whose segment file is not there, or shorter than it must be."""

    live: Live
    missing: int


class Files:
    """One folder, locked while this is open. ``direct``: blocks go past the page cache. Raises OSError throughout."""

    def __init__(self, folder: Path, lock: int) -> None:
        self._folder = folder
        self._lock = lock
        self._log = -1
        self._segments: dict[int, int] = {}
        self._entries = self._kept = 0
        self._seq = 1
        self.direct = False

    @classmethod
    def open(cls, folder: str, capacity: int) -> tuple[Self, Found]:
        """Lock the folder and read what is there; segments beyond ``capacity`` bytes and strange ones are removed.
        Raises InUse."""
        path = Path(folder)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = cls(path, _locked(path / LOCK))
        try:
            return files, files._begin(capacity)
        except BaseException:
            files.close()
            raise

    def _begin(self, capacity: int) -> Found:
        self.direct = _is_direct(self._folder)
        live = recover(self._read_log())
        kept = self._open_segments(live, capacity)
        self.replace_log(kept)
        return Found(kept, sum(e.op is Op.PUT for e in live.entries) - sum(e.op is Op.PUT for e in kept.entries))

    def _read_log(self) -> bytes:
        try:
            return (self._folder / LOG).read_bytes()
        except FileNotFoundError:
            return b""

    def _open_segments(self, live: Live, capacity: int) -> Live:
        """Open those that are whole, the youngest first, as far as they fit; unlink the others."""
        segments = [e for e in live.entries if e.op is Op.SEGMENT]
        for e in reversed(segments):
            size, fd = e.slot * e.length, self._open(e.segment, os.O_RDWR)
            if fd < 0:
                continue
            if size <= capacity and os.fstat(fd).st_size >= size:
                self._segments[e.segment] = fd
                capacity -= size
            else:
                os.close(fd)
        for name in os.listdir(self._folder):
            match = SEGMENT.fullmatch(name)
            if match and int(match[1]) not in self._segments:
                os.unlink(self._folder / name)
        return trimmed(live, self._segments)

    def _path(self, segment: int) -> Path:
        return self._folder / f"segment-{segment:08}.blocks"

    def _open(self, segment: int, flags: int) -> int:
        """-1 where it does not exist."""
        flags |= os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)
        try:
            return os.open(self._path(segment), flags, 0o600)
        except FileNotFoundError:
            return -1

    # -- segments ----------------------------------------------------------------------------------------------

    def create(self, segment: int, size: int) -> None:
        """A file of ``size`` bytes that are really there, so that no later write finds the disk full."""
        fd = self._open(segment, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.posix_fallocate(fd, 0, size)
        except BaseException:
            os.close(fd)
            os.unlink(self._path(segment))
            raise
        self._segments[segment] = fd

    def remove(self, segment: int) -> None:
        fd = self._segments.pop(segment, None)
        if fd is not None:
            os.close(fd)
            os.unlink(self._path(segment))

    def write(self, segment: int, offset: int, data: Sequence[memoryview]) -> None:
        """``data`` are whole pages of page-aligned memory, written behind each other."""
        if os.pwritev(self._segments[segment], data, offset) != sum(map(len, data)):
            raise OSError(errno.EIO, "blocks were written in part", str(self._path(segment)))

    def read(self, segment: int, offset: int, into: Sequence[memoryview]) -> None:
        if os.preadv(self._segments[segment], into, offset) != sum(map(len, into)):
            raise OSError(errno.EIO, "blocks were read in part", str(self._path(segment)))

    # -- the log -----------------------------------------------------------------------------------------------

    def append(self, entries: Iterable[Entry]) -> None:
        data = self._codec.encode_all(entries, self._seq)
        if data and os.write(self._log, data) != len(data):
            raise OSError(errno.ENOSPC, "the log was written in part", str(self._folder / LOG))
        self._entries += len(data) // ENTRY
        self._seq += len(data) // ENTRY

    def compact(self) -> None:
        """Write the log anew where most of it says what is no longer so. Reads it again: the state in memory belongs
        to the event loop."""
        if self._entries <= 2 * self._kept + COMPACT_OVER:
            return
        try:
            self.replace_log(recover(self._read_log()))
        except OSError as e:
            logger.warning("the log was not written anew, it goes on growing", error=str(e))
            self._kept = self._entries  # tried again when it has doubled

    def replace_log(self, live: Live) -> None:
        """A whole new log that says ``live``, or the old one, whenever this ends."""
        data, new = rewrite(live), self._folder / NEW_LOG
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _write_all(fd, data)
            os.fdatasync(fd)
            os.rename(new, self._folder / LOG)
        except BaseException:
            os.close(fd)
            raise
        _sync(self._folder)
        if self._log >= 0:
            os.close(self._log)
        self._log, self._codec = fd, Codec(data[:HEADER])
        self._entries = self._kept = len(live.entries)
        self._seq = self._entries + 1

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Idempotent. The folder is free for another agent."""
        if self._log >= 0:
            try:
                os.fdatasync(self._log)
            except OSError:
                pass  # what is lost is found out when it is read
            os.close(self._log)
        for fd in self._segments.values():
            os.close(fd)
        self._segments.clear()
        if self._lock >= 0:
            os.close(self._lock)
        self._log = self._lock = -1


def _locked(path: Path) -> int:
    """Ends with the process, however that ends."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + LOCK_PATIENCE
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError as e:
            if time.monotonic() > deadline:
                os.close(fd)
                raise InUse(e.errno, "another agent uses the folder", str(path.parent)) from e
            time.sleep(0.05)
        except BaseException:
            os.close(fd)
            raise


def _is_direct(folder: Path) -> bool:
    """Does the file system take O_DIRECT? Tried with a page. Raises OSError for a folder that cannot be written."""
    path = folder / "probe"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        direct = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        return False
    else:
        return _takes_page(direct)
    finally:
        os.close(fd)
        os.unlink(path)


def _takes_page(fd: int) -> bool:
    with mmap.mmap(-1, ALIGN) as page:
        try:
            return os.pwrite(fd, page, 0) == ALIGN
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
            return False
        finally:
            os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def _sync(folder: Path) -> None:
    """Best effort: a rename that is lost with the machine's power brings the old log back."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
