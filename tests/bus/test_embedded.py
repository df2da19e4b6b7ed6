"""Embedded servers: found, started, restarted on their port, and gone with whoever started them, even by kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from shared.embedded import NatsServer, RedisServer, Server, free_port
from shared.errors import Unavailable


@pytest.mark.parametrize("kind", [NatsServer, RedisServer])
def test_start_kill_restart_stop(kind: type[Server]) -> None:
    alive = []
    with kind() as server:
        port, first = server.port, server.process.pid
        assert server.url.endswith((f":{port}", f":{port}/0"))
        alive.append(server.alive)
        server.kill()
        server.kill()
        alive.append(server.alive)
        server.start()
        alive.append(server.alive)
        assert server.port == port and server.process.pid != first
    alive.append(server.alive)
    assert alive == [True, False, True, False]
    server.stop()
    with pytest.raises(Unavailable):
        _ = server.process


def test_a_taken_fixed_port_is_an_error() -> None:
    with RedisServer() as server, pytest.raises(Unavailable, match=str(server.port)):
        NatsServer(server.port).start(timeout=2)
    assert free_port()


def test_nothing_survives_a_killed_parent() -> None:
    program = (
        "import time; from shared.embedded import *; r = RedisServer().start(); n = NatsServer().start();"
        "print(r.process.pid, n.process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 100
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(running, pids))


def running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
    finally:
        assert pid != os.getpid()
