"""What can be wrong with settings and is cheap to see before a process starts. All raise ConfigError."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from cli.console import bytes_text
from cli.leftovers import NAME
from cli.probe import why_unreachable
from shared.addresses import shown
from shared.api_keys import read_key_file
from shared.calibration import read_calibration
from shared.errors import ConfigError

LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where a container's memory limit stands, of both versions of control groups."""
LONGEST = 108
"""Bytes of a socket's name."""


@contextmanager
def port_claimed(host: str, port: int) -> Iterator[None]:
    """While the block runs no other mesh is started there: between the look at a port and the conductors that listen on
    it there are seconds, and conductors that share their port would share it with those of another mesh."""
    with socket.socket(socket.AF_UNIX) as claim:
        try:
            claim.bind(f"\0{NAME}up-{port}-{host}".encode()[:LONGEST])
        except OSError:
            why = "another mesh is there, or about to be (choose another with --port)"
            raise ConfigError(f"cannot serve on {host}:{port}: {why}", field="port") from None
        yield


def server_answers(name: str, url: str) -> None:
    """``name``: nats or redis."""
    if why := why_unreachable(url, timeout=3.0):
        raise ConfigError(f"--{name}: no server answers at {shown(url)}: {why}", field=name)


def keys_can_be_read(path: str) -> None:
    """The file of API keys, as the conductor will read it."""
    try:
        read_key_file(Path(path))
    except ConfigError as error:
        raise ConfigError(f"--api-keys: {error.message}", field="api_keys") from None


def is_calibration(path: str) -> None:
    """The file of latency models, as instances will read it; whether it is of their engine, they know."""
    read_calibration(path)


def folder_takes_files(flag: str, path: str) -> None:
    """Makes the folder where it is not there. A tier that cannot be used would only rest, and say so in the log."""
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return
    except OSError as error:
        raise ConfigError(f"{flag}: cannot keep files in {path}: {error.strerror}", field="ssd_path") from None


def pools_fit(pools: int, each: int) -> None:
    """Pools are filled little by little: one too large would be the end of some process, much later."""
    if pools * each > (there := memory_limit()):
        many = f"{pools} pools of {bytes_text(each)}" if pools > 1 else f"a pool of {bytes_text(each)}"
        raise ConfigError(f"--pool-bytes: {many} would not fit into memory ({bytes_text(there)})", field="pool_bytes")


def memory_limit() -> int:
    """Bytes that the processes of this machine, or of this container, can have together."""
    limits = [psutil.virtual_memory().total]
    for path in LIMITS:
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # another version, or "max"
            continue
    return min(limits)
