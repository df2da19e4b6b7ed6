"""What a mesh has left on this machine: processes, sockets, shared memory and temporary files of ours."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

MARK = "MOONCAKE_MESH_ID"
"""Variable in the environment of every process that ``mooncake up`` starts, and of their children."""

NAME = "mooncake-"
"""Abstract sockets, memory files and temporary folders of ours start with it."""

OURS = re.compile(rb"(^|\0)-m\0services\.(store|prefill|decode|conductor)(\0|$)|cli/warden\.py\0")

Kind = Literal["process", "socket", "memory", "file"]


class Leftover(msgspec.Struct, frozen=True):
    """One thing. ``pid`` is its process or the one that holds it, 0 if none is known."""

    kind: Kind
    what: str
    pid: int = 0


def leftovers(proc: Path = Path("/proc"), folders: tuple[Path, ...] | None = None) -> list[Leftover]:
    """Everything of ours, of whatever mesh, running or not; the asking process and its parents are not meant."""
    if folders is None:
        folders = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    found: list[Leftover] = []
    for pid in sorted(set(_pids(proc)) - _lineage(proc)):
        found += _process(proc / str(pid), pid)
        found += _memory(proc / str(pid), pid)
    found += _sockets(proc)
    found += [Leftover("file", str(path)) for folder in folders for path in sorted(folder.glob(f"{NAME}*"))]
    return found


def _pids(proc: Path) -> Iterator[int]:
    return (int(entry.name) for entry in proc.iterdir() if entry.name.isdigit())


def _lineage(proc: Path) -> set[int]:
    """This process and its ancestors: a test or a shell inside a mesh is no leftover of it."""
    pids, pid = set[int](), os.getpid()
    while pid > 0 and pid not in pids:
        pids.add(pid)
        try:
            pid = int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    return pids


def _read(path: Path) -> bytes:
    """Empty for what ended meanwhile and for other people's processes."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _process(folder: Path, pid: int) -> list[Leftover]:
    command = _read(folder / "cmdline")
    marked = any(part.startswith(f"{MARK}=".encode()) for part in _read(folder / "environ").split(b"\0"))
    if not marked and not OURS.search(command):
        return []
    return [Leftover("process", command.replace(b"\0", b" ").decode(errors="replace").strip() or "?", pid)]


def _memory(folder: Path, pid: int) -> list[Leftover]:
    names: set[str] = set()
    with contextlib.suppress(OSError):
        for entry in (folder / "fd").iterdir():
            with contextlib.suppress(OSError):
                names.add(os.readlink(entry))
    return [Leftover("memory", name, pid) for name in sorted(names) if name.startswith(f"/memfd:{NAME}")]


def _sockets(proc: Path) -> list[Leftover]:
    paths = (line.split()[-1] for line in _read(proc / "net/unix").decode(errors="replace").splitlines()[1:])
    ours = {path for path in paths if path.startswith(f"@{NAME}") or f"/{NAME}" in path}
    return [Leftover("socket", path) for path in sorted(ours)]
