"""The warden of a mesh: kills what is left of it when its supervisor died without a word (``kill -9``).

Run as ``python -I -S warden.py FD MARK [NAME]``, in a session of its own, with nothing but the standard library, so
that it starts at once and weighs little. FD is the read end of a pipe whose other end only the supervisor holds: it
names the process groups it has started (``+123``) and seen end (``-123``); end of file means that it is gone.

The kernel's parent-death signal already takes the supervisor's own children; the warden also takes their children,
found by process group and by the mark ``NAME=MARK`` in their environment (``MOONCAKE_MESH_ID`` unless it is named).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

ROUNDS = 50
PAUSE = 0.1
NAME = "MOONCAKE_MESH_ID"


def marked(mark: str, name: str = NAME) -> list[int]:
    """Processes (other than this one) whose environment carries ``name=mark``."""
    wanted = f"{name}={mark}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid() and wanted in _environment(entry):
            found.append(int(entry))
    return found


def _environment(pid: str) -> list[bytes]:
    """Empty for zombies, kernel threads and other people's processes."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def registered(fd: int) -> set[int]:
    """Reads the pipe to its end: the process groups that were not seen to end."""
    groups: set[int] = set()
    with os.fdopen(fd, "r", encoding="ascii") as pipe:
        for line in pipe:
            word = line.strip()
            if word.startswith("+"):
                groups.add(int(word[1:]))
            elif word.startswith("-"):
                groups.discard(int(word[1:]))
    return groups


def kill_all(groups: set[int], mark: str, name: str = NAME) -> None:
    """SIGKILL until nothing with the mark is left: a process may fork while it is being looked for."""
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    for _ in range(ROUNDS):
        pids = marked(mark, name)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    kill_all(registered(int(sys.argv[1])), *sys.argv[2:])


if __name__ == "__main__":
    main()
