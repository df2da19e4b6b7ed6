"""What counts as left over: by mark, by command line, by name; never the asking process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cli.leftovers import MARK, Leftover, leftovers
from tests.cli.conftest import eventually


def test_a_marked_process_with_its_memory_is_found_and_gone_when_it_is(mark: str) -> None:
    code = "import os, time; os.memfd_create('mooncake-pool-x'); time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-S", "-c", code], env={MARK: mark}) as process:
        try:
            memory = Leftover("memory", "/memfd:mooncake-pool-x (deleted)", process.pid)
            assert eventually(lambda: memory in leftovers())
            assert [item.kind for item in leftovers() if item.pid == process.pid] == ["process", "memory"]
        finally:
            process.kill()
    assert not [item for item in leftovers() if item.pid == process.pid]


def test_an_abstract_socket_is_found_while_it_is_open(mark: str) -> None:
    name = f"mooncake-{mark}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        assert Leftover("socket", "@" + name) in leftovers()
    assert Leftover("socket", "@" + name) not in leftovers()


def test_files_of_ours_are_found(tmp_path: Path) -> None:
    (tmp_path / "mooncake-embedded-1").mkdir()
    (tmp_path / "other").touch()
    found = leftovers(folders=(tmp_path, tmp_path / "missing"))
    assert [item for item in found if item.kind == "file"] == [Leftover("file", str(tmp_path / "mooncake-embedded-1"))]


@pytest.fixture
def fake_proc(tmp_path: Path) -> Path:
    """A /proc with one process of every sort; numbers above what a kernel gives."""
    processes = {
        10**9: (b"python\0-m\0services.store\0--id\0x\0", b""),
        10**9 + 1: (b"/usr/bin/nats-server\0", b"A=1\0MOONCAKE_MESH_ID=abc\0"),
        10**9 + 2: (b"python\0-m\0services.storefront\0", b"X_MOONCAKE_MESH_ID=abc\0"),
        10**9 + 3: (b"", b""),
        10**9 + 4: (b"/usr/bin/python\0-I\0/x/cli/warden.py\x003\0abc\0", b""),
    }
    for pid, (command, environment) in processes.items():
        (tmp_path / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / str(pid) / "cmdline").write_bytes(command)
        (tmp_path / str(pid) / "environ").write_bytes(environment)
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "unix").write_text("Num RefCount\n0: 2 @mooncake-a\n0: 2 @other\n0: 2 /run/mooncake-b\n0: 2\n")
    (tmp_path / "self").mkdir()
    return tmp_path


def test_ours_are_told_from_others(fake_proc: Path) -> None:
    found = leftovers(fake_proc, ())
    assert [item.pid - 10**9 for item in found if item.kind == "process"] == [0, 1, 4]
    assert [item.what for item in found if item.kind == "socket"] == ["/run/mooncake-b", "@mooncake-a"]


def test_the_asking_process_and_its_parents_are_not_meant() -> None:
    code = "from cli.leftovers import leftovers; import os; print(os.getpid() in [i.pid for i in leftovers()])"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, MARK: "asking"}, capture_output=True, text=True, timeout=200
    )
    assert done.stdout == "False\n", done.stderr
