"""Cables of the RDMA guest, at the switch."""

from __future__ import annotations

import fcntl
import socket
import struct

GET_FLAGS, SET_FLAGS, UP = 0x8913, 0x8914, 1
"""ioctls of network interfaces, and the flag that they are up."""


def carry(interface: str, up: bool) -> None:
    """Plug or pull it, at once: a program that does it takes a second of the guest's one CPU from the transfers that it
    shall interrupt."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        name, flags = struct.unpack("16sH", fcntl.ioctl(asked, GET_FLAGS, struct.pack("16sH", interface.encode(), 0)))
        fcntl.ioctl(asked, SET_FLAGS, struct.pack("16sH", name, flags | UP if up else flags & ~UP))
