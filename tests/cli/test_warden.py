"""After ``kill -9`` of a supervisor nothing of its mesh is left, grandchildren that left their group included."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli import warden
from tests.cli.conftest import alive, eventually

SUPERVISOR = """
import asyncio, sys
from cli.supervisor import Supervisor
from tests.cli.conftest import Heard, python

CODE = "import subprocess,sys,time; p = subprocess.Popen(['sleep', '1000'], start_new_session=True); time.sleep(1000)"

async def main():
    async with Supervisor(sys.argv[1], Heard()) as supervisor:
        for name in "ab":
            await supervisor.start(python(name, CODE, sys.argv[1]))
        print("up", flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""
ROOT = Path(__file__).resolve().parents[2]


def test_nothing_survives_kill_nine(mark: str) -> None:
    argv = [sys.executable, "-c", SUPERVISOR, mark]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}) as up:
        assert up.stdout is not None and up.stdout.readline() == b"up\n"
        assert eventually(lambda: len(warden.marked(mark)) == 4), "two children, and a child of each"
        pids = warden.marked(mark)
        up.send_signal(signal.SIGKILL)
        up.wait(100)
    assert eventually(lambda: not any(alive(pid) for pid in pids))
    assert eventually(lambda: not _wardens(mark)), "and the warden goes home"


def _wardens(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                argv = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(word.endswith(b"warden.py") for word in argv) and mark.encode() in argv:
                found.append(int(entry.name))
    return found


def test_a_warden_ignores_what_stops_others(mark: str) -> None:
    """Ctrl-C goes to a whole terminal; the warden must outlive what it watches."""
    read, write = os.pipe()
    argv = [sys.executable, "-I", "-S", warden.__file__, str(read), mark]
    with subprocess.Popen(argv, pass_fds=[read], env={}, start_new_session=True) as process:
        os.close(read)
        assert eventually(lambda: _ignores(process.pid, signal.SIGTERM))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process.send_signal(number)
        assert process.poll() is None
        os.close(write)
        assert process.wait(100) == 0


def _ignores(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn"))
    return bool(int(ignored, 16) >> (number - 1) & 1)


@pytest.mark.parametrize(
    ("text", "groups"),
    [("", set()), ("+5\n+6\n-5\n", {6}), ("+5\n-7\n", {5}), ("+5\nwhat?\n", {5})],
)
def test_the_pipe_names_the_groups_alive(text: str, groups: set[int]) -> None:
    read, write = os.pipe()
    os.write(write, text.encode())
    os.close(write)
    assert warden.registered(read) == groups
