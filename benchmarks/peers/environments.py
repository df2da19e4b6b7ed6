"""Environments of the peers: a venv for each under ``.venv-peers``, installed by name; what cannot be had says why."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.lines import ROOT

FOLDER = ROOT / ".venv-peers"
LIBRARIES = FOLDER / "lib"
VERBS = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")
GIB = 1 << 30


@dataclass(frozen=True)
class Peer:
    """``room``: bytes of disk that its packages take while they are installed."""

    name: str
    packages: tuple[str, ...]
    room: int


UPSTREAM = Peer("upstream", ("mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy"), GIB)
DYNAMO = Peer("dynamo", ("ai-dynamo-runtime==1.6.1", "numpy"), GIB)
NIXL = Peer("nixl", ("nixl-cu12==1.5.1", "numpy"), 12 * GIB)
"""It depends on torch, whose CUDA build alone takes some GB: ``torch`` below names another one."""


class Missing(Exception):
    """A peer cannot be had here; the message says why."""


def python_of(peer: Peer, torch: str = "") -> Path:
    """The interpreter of the peer's environment, made on first use. ``torch``: pip arguments for the torch to install
    first, where the peer needs one. Raises Missing."""
    home = FOLDER / peer.name
    stamp, python = home / ".installed", home / "bin/python"
    wanted = "\n".join(peer.packages)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    FOLDER.mkdir(exist_ok=True)
    free, room = shutil.disk_usage(FOLDER).free, 4 * GIB if torch and peer is NIXL else peer.room
    if free < room:
        raise Missing(f"needs {room // GIB} GiB of disk, {free // GIB} are free")
    print(f"installing {', '.join(peer.packages)} into {home.relative_to(ROOT)}", file=sys.stderr)
    _run([sys.executable, "-m", "venv", str(home)])
    pip = [str(python), "-m", "pip", "install", "-q"]
    if torch and peer is NIXL:
        _run([*pip, *shlex.split(torch)])
    _run([*pip, *peer.packages])
    stamp.write_text(wanted)
    return python


def library_path() -> dict[str, str]:
    """Environment in which a peer finds libibverbs, which wheels expect of the system. Where it is not installed, it is
    unpacked beside the environments from the distribution's packages. Raises Missing."""
    try:
        ctypes.CDLL("libibverbs.so.1")
        return {}
    except OSError:
        folders = unpacked(*VERBS)
    return {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, [*folders, os.environ.get("LD_LIBRARY_PATH", "")]))}


def unpacked(*packages: str) -> list[str]:
    """The folders with the shared libraries of Debian packages, unpacked and not installed. Raises Missing."""
    for package in packages:
        stamp = LIBRARIES / f".{package}"
        if stamp.exists():
            continue
        if not shutil.which("apt-get") or not shutil.which("dpkg"):
            raise Missing(f"{package} is not installed, and there is no apt-get to get it with")
        LIBRARIES.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o777)  # apt downloads as a user of its own
            _run(["apt-get", "download", "-q", package], folder)
            (file,) = Path(folder).glob("*.deb")
            _run(["dpkg", "-x", str(file), str(LIBRARIES)])
        stamp.touch()
    triplet = f"{os.uname().machine}-linux-gnu"
    return [str(LIBRARIES / "usr/lib" / triplet), str(LIBRARIES / "lib" / triplet)]


def _run(command: list[str], folder: str | None = None) -> None:
    done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip() and "WARNING" not in line]
        raise Missing(f"{' '.join(command[:4])} ... failed: {said[-1] if said else done.returncode}")
