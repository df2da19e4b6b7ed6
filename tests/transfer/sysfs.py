"""A sysfs tree in a folder, as the kernel would show a server with these devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self


class Sysfs:
    """``root`` is to be read instead of /sys. Methods return self."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def node(self, number: int) -> Self:
        (self.root / f"devices/system/node/node{number}").mkdir(parents=True)
        return self

    def pci(self, path: Sequence[str], numa: int, vendor: str = "0x15b3", kind: str = "0x020000") -> Self:
        """A device at the end of ``path``: addresses from below the root complex down."""
        self._device(path, numa, vendor, kind)
        return self

    def gpu(self, path: Sequence[str], numa: int) -> Self:
        return self.pci(path, numa, "0x10de", "0x030200")

    def nic(self, name: str, path: Sequence[str], numa: int) -> Self:
        folder = self._device(path, numa, "0x15b3", "0x020000") / "infiniband" / name
        folder.mkdir(parents=True)
        (folder / "device").symlink_to(folder.parents[1])
        self._listed("class/infiniband", name, folder)
        return self

    def software_nic(self, name: str, interface: str, path: Sequence[str] = (), numa: int = -1) -> Self:
        """Soft-RoCE: no device of its own, ``parent`` names the interface below."""
        folder = self.root / "devices/virtual/infiniband" / name
        folder.mkdir(parents=True)
        (folder / "parent").write_text(interface + "\n")
        self._listed("class/infiniband", name, folder)
        if path:
            net = self._device(path, numa, "0x8086", "0x020000") / "net" / interface
            net.mkdir(parents=True)
            (net / "device").symlink_to(net.parents[1])
            self._listed("class/net", interface, net)
        return self

    def _device(self, path: Sequence[str], numa: int, vendor: str, kind: str) -> Path:
        folder = self.root.joinpath("devices", "pci" + path[0][:7], *path)
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in (("numa_node", str(numa)), ("vendor", vendor), ("class", kind)):
            (folder / name).write_text(value + "\n")
        self._listed("bus/pci/devices", path[-1], folder)
        return folder

    def _listed(self, where: str, name: str, folder: Path) -> None:
        link = self.root / where / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(folder)


def two_sockets(root: Path) -> Sysfs:
    """Two NUMA nodes. At the first, two switches with a GPU and a NIC each; at the second, two NICs and a GPU apart."""
    sysfs = Sysfs(root).node(0).node(1)
    for number, port in enumerate(("0000:00:01.0", "0000:00:02.0")):
        switch = [port, f"0000:1{number}:00.0"]
        sysfs.gpu([*switch, f"0000:1{number}:01.0", f"0000:2{number}:00.0"], numa=0)
        sysfs.nic(f"mlx5_{number}", [*switch, f"0000:1{number}:02.0", f"0000:3{number}:00.0"], numa=0)
    sysfs.nic("mlx5_2", ["0000:80:01.0", "0000:81:00.0"], numa=1)
    sysfs.nic("mlx5_3", ["0000:80:02.0", "0000:82:00.0"], numa=1)
    return sysfs.gpu(["0000:80:03.0", "0000:83:00.0"], numa=1)
