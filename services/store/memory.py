"""The memory of one slab: an anonymous shared file that lives as long as somebody maps it or holds its descriptor."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt

from shared.blocks import Geometry

ALIGN = 4096


def stride_of(geometry: Geometry) -> int:
    """Bytes from slot to slot: whole pages."""
    return -(-geometry.slot_bytes // ALIGN) * ALIGN


def shared_file(name: str, size: int) -> int:
    """Descriptor of an anonymous shared file. Sealed: nobody who maps it dies because another one shrinks it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _closed_with(stack: contextlib.ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd


class SlabMemory:
    """``slots`` slots of ``stride`` bytes, and beside them ``words``, the slots' generations, which engines do not map.
    Nothing is left behind when all processes are gone."""

    def __init__(self, name: str, slots: int, geometry: Geometry) -> None:
        """Raises OSError where the system gives neither memory nor descriptors, and leaves nothing behind."""
        self.slots = slots
        self.geometry = geometry
        self.stride = stride_of(geometry)
        self.size = slots * self.stride
        with contextlib.ExitStack() as undo:
            self.fd = _closed_with(undo, shared_file(name, self.size))
            self._map = mmap.mmap(self.fd, self.size)
            self.words_fd = _closed_with(undo, shared_file(name + ".generations", 8 * slots))
            self.words: npt.NDArray[np.uint64] = np.frombuffer(mmap.mmap(self.words_fd, 8 * slots), np.uint64)
            undo.pop_all()
        self.view = memoryview(self._map)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def range(self, slot: int, length: int) -> memoryview:
        """The first ``length`` bytes of a slot."""
        return self.view[slot * self.stride : slot * self.stride + length]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy inside the slab, without the GIL."""
        np.copyto(self.bytes[target : target + length], self.bytes[source : source + length])

    def close(self) -> None:
        """Our mapping ends; those of engines live on."""
        self.view.release()
        self.bytes = np.empty(0, np.uint8)
        self.words = np.empty(0, np.uint64)
        os.close(self.fd)
        os.close(self.words_fd)
        try:
            self._map.close()
        except BufferError:
            pass  # a slice of it is still referred to; it goes with the last one
