"""What ``mooncake doctor`` looks at. Nothing here imports torch or opens a device: a look is quick and harmless."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from cli.probe import why_unreachable
from shared.addresses import shown
from shared.embedded import nats_binary, redis_binary
from shared.errors import ConfigError
from shared.model import DEFAULT_MODEL, cache_root, default_folder

State = Literal["ok", "info", "warn", "fail"]
NEEDED = ("aiohttp", "msgspec", "nats-py", "numpy", "redis", "tokenizers", "xxhash")
FOR_ENGINES = ("transformers", "safetensors")
OPTIONAL = ("vllm", "opentelemetry-sdk")
LEAST_MEMORY = 2 << 30
SYSTEM_PACKAGES = (Path("/usr/lib/python3/dist-packages"),)


class Check(msgspec.Struct, frozen=True):
    """``fail``: nothing works without it. ``warn``: something will not. ``info``: neither good nor bad."""

    name: str
    state: State
    detail: str


@dataclass(frozen=True)
class Targets:
    """URLs to look for."""

    conductor: str
    nats: str
    redis: str


def all_checks(targets: Targets) -> list[Check]:
    return [
        python(),
        machine(),
        *map(package, NEEDED),
        torch(),
        *(package(name, "warn") for name in FOR_ENGINES),
        *(package(name, "info") for name in OPTIONAL),
        binary("nats-server", nats_binary),
        binary("valkey-server", redis_binary),
        model_cache(),
        memory(),
        shared_memory(),
        *rdma(),
        *(service(name, url) for name, url in vars(targets).items()),
    ]


def python() -> Check:
    good = sys.version_info >= (3, 11)
    return Check("python", "ok" if good else "fail", f"{platform.python_version()} at {sys.executable}")


def machine() -> Check:
    """Memory files and pidfds need Linux."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    good = hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")
    return Check("machine", "ok" if good else "fail", f"{platform.system()} {platform.release()}, {cores} cores")


def package(name: str, missing: State = "fail") -> Check:
    try:
        return Check(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name, missing, "not installed")


def torch() -> Check:
    """Which build, read from its version file: importing it takes seconds."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return Check("torch", "warn", "not installed: no `transformers` engine (pip install 'mooncake-mesh[engine]')")
    version = runpy.run_path(str(Path(found.submodule_search_locations[0]) / "version.py"))
    build = f"CUDA {version['cuda']}" if version.get("cuda") else "CPU build"
    device = "an NVIDIA driver is loaded" if Path("/proc/driver/nvidia/version").exists() else "no NVIDIA driver"
    return Check("torch", "ok", f"{version['__version__']}, {build}, {device}")


def binary(name: str, find: Callable[[], Path]) -> Check:
    """Only ``mooncake up`` without ``--nats`` or ``--redis`` needs them."""
    try:
        path = find()
        output = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (ConfigError, OSError, subprocess.SubprocessError) as error:
        return Check(name, "warn", str(error))
    version = re.search(r"\d+(?:\.\d+)+", output)
    return Check(name, "ok", f"{version[0] if version else 'found'} at {path}")


def model_cache() -> Check:
    folder = default_folder()
    if folder is None:
        return Check("model", "info", f"{DEFAULT_MODEL} is not in {cache_root()} yet (mooncake model fetch)")
    return Check("model", "ok", f"{DEFAULT_MODEL} in {folder}")


def memory() -> Check:
    free = available_memory(Path("/proc/meminfo"))
    return Check("memory", "ok" if free >= LEAST_MEMORY else "warn", f"{free / 2**30:.1f} GiB available")


def available_memory(meminfo: Path) -> int:
    """Bytes; 0 when it cannot be told."""
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0


def shared_memory() -> Check:
    """Pools are memory files, which the size of /dev/shm does not limit; containers' memory limits do."""
    try:
        space = os.statvfs("/dev/shm")
    except OSError:
        return Check("/dev/shm", "info", "not there")
    size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    return Check("/dev/shm", "info", f"{size / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free (pools do not need it)")


def rdma() -> Iterator[Check]:
    """pyverbs found, found for another Python, or no device: three different things to do about it."""
    devices = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    found = pyverbs()
    others = pyverbs_elsewhere(SYSTEM_PACKAGES)
    if found:
        yield Check("pyverbs", "ok", found)
    elif others:
        mine = f"{sys.version_info.major}.{sys.version_info.minor}"
        yield Check("pyverbs", "warn", f"found for {', '.join(others)}, but this is Python {mine}: RDMA is off")
    else:
        yield Check("pyverbs", "info", "not installed: RDMA is off (apt install python3-pyverbs ibverbs-providers)")
    yield Check("RDMA devices", "ok" if devices else "info", ", ".join(devices) or "none")


def pyverbs() -> str:
    """Where the pyverbs is that this interpreter would load; "" for none. Only it is taken from the distribution."""
    finder = importlib.machinery.PathFinder
    spec = importlib.util.find_spec("pyverbs") or finder.find_spec("pyverbs", [str(path) for path in SYSTEM_PACKAGES])
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    fits = any(
        (folder / f"device{suffix}").exists() for folder in folders for suffix in importlib.machinery.EXTENSION_SUFFIXES
    )
    return str(folders[0]) if fits else ""


def pyverbs_elsewhere(folders: tuple[Path, ...]) -> list[str]:
    """File name tags (``cpython-311-...``) of builds of pyverbs that this interpreter does not see or cannot load."""
    built = [path for folder in folders for path in folder.glob("pyverbs/*.so")]
    return sorted({path.name.split(".")[1] for path in built if path.name.count(".") > 1})


ABSENT = {
    "conductor": "no mesh is served there",
    "nats": "`mooncake up` starts its own where --nats names none",
    "redis": "`mooncake up` starts its own where --redis names none",
}


def service(name: str, url: str) -> Check:
    why = why_unreachable(url)
    return (
        Check(name, "info", f"{shown(url)}: {why} ({ABSENT[name]})")
        if why
        else Check(name, "ok", f"{shown(url)} answers")
    )
