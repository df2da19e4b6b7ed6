"""The NICs, GPUs and NUMA nodes of this server, as sysfs shows them, and the matrix that follows from them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from services.store.transfer.topology.matrix import Matrix, Tiers

SYSFS = Path("/sys")
PCI = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
NODE = re.compile(r"node(\d+)")
GPU_VENDORS = ("0x10de", "0x1002")
GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
"""VGA, 3D and other display controllers, processing accelerators."""
UNKNOWN = -1


@dataclass(frozen=True)
class Device:
    """``node``: its NUMA node, -1 where the platform does not say. ``path``: PCI addresses from the root complex down
    to the device itself; empty for devices that are on no PCI bus."""

    name: str
    node: int = UNKNOWN
    path: tuple[str, ...] = ()


@dataclass(frozen=True)
class Inventory:
    """``gpus`` are in the order of their PCI addresses: that of CUDA under ``CUDA_DEVICE_ORDER=PCI_BUS_ID``."""

    nics: tuple[Device, ...] = ()
    gpus: tuple[Device, ...] = ()
    nodes: tuple[int, ...] = (0,)


def look(sysfs: Path = SYSFS) -> Inventory:
    """Reads a few small files below ``sysfs``; what is missing there is not on this server. Blocking, quick."""
    nics = tuple(_nic(sysfs, folder) for folder in _entries(sysfs / "class/infiniband"))
    pci = [folder for folder in _entries(sysfs / "bus/pci/devices") if _is_gpu(folder)]
    gpus = tuple(_device(f"cuda:{number}", folder) for number, folder in enumerate(pci))
    names = [NODE.fullmatch(folder.name) for folder in _entries(sysfs / "devices/system/node")]
    nodes = tuple(sorted(int(name[1]) for name in names if name))
    return Inventory(nics, gpus, nodes or (0,))


def matrix_of(inventory: Inventory) -> Matrix:
    """Pure. Of memory on a NUMA node the NICs of that node are preferred; of a GPU those behind the same PCIe switch
    (the closest one that has any), else those of its NUMA node. A NIC whose node is unknown is near to every node."""
    tiers = {f"cpu:{node}": _split(inventory, _near(inventory, node)) for node in inventory.nodes}
    for gpu in inventory.gpus:
        tiers[gpu.name] = _split(inventory, _same_switch(inventory, gpu) or _near(inventory, gpu.node))
    return Matrix(tiers)


def discover(sysfs: Path = SYSFS) -> Matrix:
    return matrix_of(look(sysfs))


# -- closeness ---------------------------------------------------------------------------------------------


def _split(inventory: Inventory, near: set[str]) -> Tiers:
    names = [nic.name for nic in inventory.nics]
    return Tiers(tuple(name for name in names if name in near), tuple(name for name in names if name not in near))


def _near(inventory: Inventory, node: int) -> set[str]:
    return {nic.name for nic in inventory.nics if UNKNOWN in (node, nic.node) or nic.node == node}


def _same_switch(inventory: Inventory, gpu: Device) -> set[str]:
    """NICs that share the most bridges with the GPU, at least one below the root complex."""
    shared = {nic.name: _common(nic.path[:-1], gpu.path[:-1]) for nic in inventory.nics}
    most = max(shared.values(), default=0)
    return {name for name, depth in shared.items() if depth == most} if most >= 2 else set()


def _common(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    depth = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        depth += 1
    return depth


# -- sysfs -------------------------------------------------------------------------------------------------


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _nic(sysfs: Path, folder: Path) -> Device:
    """A software NIC has no device of its own: it is where the network interface below it is."""
    device = folder / "device"
    parent = _text(folder / "parent")
    if not device.exists() and parent and "/" not in parent:
        device = sysfs / "class/net" / parent / "device"
    return _device(folder.name, device)


def _device(name: str, folder: Path) -> Device:
    try:
        where = folder.resolve(strict=True)
    except (OSError, RuntimeError):
        return Device(name)
    path = tuple(part for part in where.parts if PCI.fullmatch(part))
    text = _text(where / "numa_node")
    return Device(name, int(text) if text.isdecimal() else UNKNOWN, path)


def _is_gpu(folder: Path) -> bool:
    return _text(folder / "vendor") in GPU_VENDORS and _text(folder / "class").startswith(GPU_CLASSES)
