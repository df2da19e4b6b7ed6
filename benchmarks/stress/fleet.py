"""The processes of a stress run: Redis, agents on fixed addresses, and clients; started again wherever they died."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec
import redis

from benchmarks.stress.board import Board, Count
from benchmarks.stress.client import SPACE, Job
from cli.leftovers import MARK
from services.store.client import plain_namespace
from services.store.memory import stride_of
from services.store.transfer.sockets import unix_address
from shared.embedded import RedisServer, die_with_parent, free_port

ROOT = Path(__file__).resolve().parents[2]
REDIS_TIMEOUT = 5.0
GRACE = 60.0
"""Seconds that a process has to end after SIGTERM; a loaded machine is slow."""


@dataclass(frozen=True)
class Options:
    """``keys``: the working set. ``slots``: of each agent's pool. ``ssd``: agents have an SSD tier."""

    agents: int = 3
    writers: int = 3
    readers: int = 3
    holders: int = 2
    evictors: int = 2
    landers: int = 2
    depth: int = 2
    keys: int = 1024
    slots: int = 96
    block_bytes: int = 64 << 10
    ssd: bool = False
    seed: int = 0


@dataclass
class Process:
    """One process, or the place of one that is to be started again. ``crashes``: when it died unasked, in words.
    ``socket``: of an agent; ``row``: of a client."""

    name: str
    argv: list[str]
    log: Path
    socket: str = ""
    row: int = -1
    child: subprocess.Popen[bytes] | None = None
    starts: int = 0
    done: int = 0
    crashes: list[str] = field(default_factory=list)

    def start(self, env: dict[str, str]) -> None:
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(
                self.argv,
                env=env,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent(),
            )
        self.starts += 1

    @property
    def alive(self) -> bool:
        return self.child is not None and self.child.poll() is None

    def signal(self, number: int) -> None:
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        if self.child is not None:
            self.child.wait()

    def ended_by_itself(self) -> bool:
        """Notes it as a crash, with its last words."""
        if self.child is None or self.child.poll() is None:
            return False
        words = " | ".join(self.log.read_text(errors="replace").splitlines()[-3:])
        self.crashes.append(f"{self.name} ended by itself with code {self.child.returncode}: {words}")
        return True


class Fleet:
    """Owner of all processes and of one temporary folder. Use it as a context: nothing is left behind."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.mark = secrets.token_hex(4)
        self.mesh = "stress"
        self._temporary = tempfile.TemporaryDirectory(prefix=f"mooncake-stress-{self.mark}-")
        self.folder = Path(self._temporary.name)
        self.redis = RedisServer()
        self._env = {**os.environ, MARK: self.mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.board = Board(self.folder / "board", self.makers, options.keys)
        self.agents: list[Process] = []
        self.clients: list[Process] = []

    @property
    def makers(self) -> int:
        """Processes that make new generations: writers, then landers."""
        return self.options.writers + self.options.landers

    @property
    def processes(self) -> list[Process]:
        return [*self.agents, *self.clients]

    def __enter__(self) -> Self:
        try:
            self.redis.start()
            self._env["MOONCAKE_REDIS"] = self.redis.url
            self.agents = [self._agent(number) for number in range(self.options.agents)]
            self.clients = self._clients()
            for process in self.processes:
                self.start(process)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start(self, process: Process) -> None:
        process.start(self._env)
        process.done = self._done(process)

    def serves(self, process: Process) -> bool:
        """An agent takes connections; a client has done something since it was started."""
        if not process.socket:
            return self._done(process) > process.done
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(unix_address(process.socket)) == 0

    def _done(self, process: Process) -> int:
        return self.board.of(process.row, Count.OPS) + self.board.of(process.row, Count.ERRORS)

    def close(self) -> None:
        """Whatever still runs is killed. Idempotent."""
        for process in self.processes:
            process.signal(signal.SIGCONT)
            process.kill()
        self.redis.stop()
        self._temporary.cleanup()

    # -- what runs -------------------------------------------------------------------------------------------

    def socket(self, agent: int) -> str:
        return f"@mooncake-stress-{self.mark}-{agent}"

    def _agent(self, number: int) -> Process:
        """Transports differ, and only the first checks what it fetches: generations must do without checksums."""
        stride = stride_of(plain_namespace(SPACE, self.options.block_bytes).geometry)
        flags = {
            "id": f"agent-{number}",
            "mesh": self.mesh,
            "socket": self.socket(number),
            "port": free_port(),
            "pool-bytes": self.options.slots * stride,
            "transports": ("prefer:shm,tcp", "require:tcp", "require:shm")[number % 3],
            "lease-ttl": 1.0,
            "metrics-port": -1,
            "log-level": "warning",
        }
        flags |= {"verify": "off"} if number else {}
        if self.options.ssd:
            flags |= {"ssd-path": self.folder / f"ssd-{number}", "ssd-bytes": 4 * self.options.slots * stride}
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        argv = [sys.executable, "-m", "services.store", *words]
        return Process(f"agent-{number}", argv, self.folder / f"agent-{number}.log", socket=self.socket(number))

    def _clients(self) -> list[Process]:
        """Writers and landers first: their numbers are those of generations."""
        o, out = self.options, list[Process]()
        roles = [("writer", o.writers), ("lander", o.landers), ("reader", o.readers), ("holder", o.holders)]
        for role, count in [*roles, ("evictor", o.evictors)]:
            for _ in range(count):
                number = len(out)
                sockets = [self.socket((number + step) % o.agents) for step in range(2)]
                job = Job(
                    role=role,
                    number=number,
                    row=number,
                    sockets=sockets,
                    board=str(self.folder / "board"),
                    writers=self.makers,
                    keys=o.keys,
                    block_bytes=o.block_bytes,
                    depth=o.depth,
                    seed=o.seed + number,
                )
                argv = [sys.executable, "-m", "benchmarks.stress.client", msgspec.json.encode(job).decode()]
                out.append(Process(f"{role}-{number}", argv, self.folder / f"{role}-{number}.log", row=number))
        return out

    # -- Redis -----------------------------------------------------------------------------------------------

    def connection(self) -> redis.Redis:
        return redis.Redis.from_url(self.redis.url, socket_timeout=REDIS_TIMEOUT, socket_connect_timeout=REDIS_TIMEOUT)

    def flush_redis(self) -> None:
        with self.connection() as link:
            link.flushall()

    def save_redis(self) -> None:
        """A copy that the next start on this port begins with."""
        with self.connection() as link:
            link.save()

    def restart_redis(self, stale: bool = False) -> None:
        """Killed and started again on the same port: empty, or with the copy that was saved last."""
        if not stale:
            with contextlib.suppress(redis.RedisError), self.connection() as link:
                folder = dict(link.config_get("dir")).get("dir", "")
                Path(str(folder), "dump.rdb").unlink(missing_ok=True)
        self.redis.kill()
        self.redis.start()

    # -- the end ---------------------------------------------------------------------------------------------

    def stop(self, processes: list[Process]) -> list[str]:
        """SIGTERM to all, and what was wrong about how they ended."""
        for process in processes:
            process.signal(signal.SIGCONT)
            process.signal(signal.SIGTERM)
        wrong, deadline = [], time.monotonic() + GRACE
        for process in processes:
            assert process.child is not None
            try:
                code = process.child.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                wrong.append(f"{process.name} did not end within {GRACE:g} s of SIGTERM")
                continue
            if code:
                wrong.append(f"{process.name} ended with code {code} after SIGTERM")
        return wrong

    def mismatches(self) -> list[str]:
        """What clients said about bytes that were wrong."""
        logs = [client.log.read_text(errors="replace").splitlines() for client in self.clients if client.log.exists()]
        return [line for lines in logs for line in lines if line.startswith("MISMATCH")]
