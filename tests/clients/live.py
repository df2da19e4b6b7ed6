"""A live mesh for clients of others: it asks for a key; further conductors serve the same mesh by other settings."""

from __future__ import annotations

import contextlib
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from shared.embedded import free_port
from tests.mesh.mesh import BASE, Mesh, start_mesh

KEY = "sk-clients-0123456789"
SETTINGS = "conductor: {default_max_tokens: 12}\n"


@contextlib.contextmanager
def live_mesh(model: Path, folder: Path, *flags: str) -> Iterator[Mesh]:
    """A mesh that serves ``model`` for :data:`KEY` and ends answers early; its files lie in ``folder``."""
    keys, settings = folder / "keys.yaml", folder / "settings.yaml"
    keys.write_text(f"tenants:\n  clients: {{keys: [{KEY}]}}\n")
    keys.chmod(0o600)
    settings.write_text(SETTINGS)
    own = ("--engine", "simulated", "--model", str(model), *BASE, "--api-keys", str(keys), "--config", str(settings))
    mesh = start_mesh([*own, *flags], folder / "log")
    mesh.key = KEY
    try:
        yield mesh
    finally:
        assert mesh.child.poll() is None, mesh.log.read_text()
        assert mesh.stop() == 0, mesh.log.read_text()


@dataclass(frozen=True)
class Conductor:
    """One more conductor of a mesh. ``url`` without a path."""

    url: str
    log: Path

    def metrics(self) -> str:
        with urllib.request.urlopen(self.url + "/metrics", timeout=60) as answer:
            return str(answer.read().decode())

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/ready", timeout=60):
                return True
        except OSError:
            return False

    def answers(self) -> bool:
        """Whether it serves HTTP, ready or not."""
        try:
            return self.ready() or bool(urllib.request.urlopen(self.url + "/health", timeout=60))
        except OSError:
            return False


@contextlib.contextmanager
def conductor_beside(mesh: Mesh, /, folder: Path, *, wait: bool = True, **settings: object) -> Iterator[Conductor]:
    """A conductor with the arguments of the mesh's own but for ``settings``. ``wait``: until it is ready."""
    own = psutil.Process(mesh.pid("services.conductor"))
    port = free_port()
    one = Conductor(f"http://127.0.0.1:{port}", folder / f"conductor-{port}.log")
    flags = {"id": f"beside-{port}", "port": port, "metrics_port": 0} | settings
    argv = [*own.cmdline(), *(word for name, value in flags.items() for word in (_flag(name), str(value)))]
    with one.log.open("wb") as out:
        child = subprocess.Popen(
            argv, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=own.environ()
        )
    try:
        deadline = time.monotonic() + 100
        while not (one.ready() if wait else one.answers()):
            assert child.poll() is None and time.monotonic() < deadline, one.log.read_text()
            time.sleep(0.05)
        yield one
    finally:
        child.terminate()
        assert child.wait(60) == 0, one.log.read_text()


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
