"""The node's KV pool as tensors: write keys and values of a layer, gather the blocks that a query attends to."""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

from shared.blocks import Geometry
from shared.engines.base import PoolMap
from shared.errors import ConfigError, NamespaceMismatch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_geometry(pool: PoolMap, geometry: Geometry) -> None:
    """Raises NamespaceMismatch, naming the first field in which the pool's blocks differ from the engine's."""
    for name in Geometry.__dataclass_fields__:
        theirs, ours = getattr(pool.geometry, name), getattr(geometry, name)
        if theirs != ours:
            raise NamespaceMismatch(f"pool has {name} {theirs}, the engine {ours}", field=name)


class KVPool:
    """Slots of ``geometry`` as one strided tensor ``[slot][layer][token][2][kv_head][head_dim]``.

    A view, never a copy: what is written here is in the pool at once, for every process that maps it.
    The mapping lives as long as this object (and tensors taken from it).
    """

    def __init__(self, slots: Tensor, geometry: Geometry) -> None:
        self.geometry = geometry
        self.slots = slots.shape[0]
        self._layers = slots.unbind(1)  # per layer [slot][token][2][kv_head][head_dim]
        self._scratch = torch.empty(0, dtype=slots.dtype)

    @classmethod
    def private(cls, geometry: Geometry, slots: int) -> KVPool:
        """A pool of zeros in this process only."""
        return cls(torch.zeros(slots, *_inner(geometry), dtype=DTYPES[geometry.dtype]), geometry)

    @classmethod
    def mapped(cls, pool: PoolMap) -> KVPool:
        """Map the file of ``pool`` shared and writable. Raises ConfigError when it is smaller than it claims or
        its slots are not aligned to elements."""
        dtype, inner = DTYPES[pool.geometry.dtype], _inner(pool.geometry)
        item = dtype.itemsize
        end = pool.offset + (pool.slots - 1) * pool.stride + pool.geometry.slot_bytes
        if pool.offset % item or pool.stride % item or pool.stride < pool.geometry.slot_bytes:
            raise ConfigError(f"pool offset {pool.offset} or stride {pool.stride} does not fit {dtype}", field="pool")
        # torch would silently enlarge a file that is too short
        if (size := os.stat(pool.path).st_size) < end:
            raise ConfigError(f"pool file has {size} bytes, {end} are needed", field="pool")
        flat = torch.from_file(pool.path, shared=True, size=end // item, dtype=dtype)
        strides = (pool.stride // item, *_contiguous(inner))
        return cls(flat.as_strided((pool.slots, *inner), strides, pool.offset // item), pool.geometry)

    def write(self, layer: int, slots: Tensor, offsets: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put ``keys`` and ``values`` ``[n][kv_head][head_dim]`` at token ``offsets[i]`` of ``slots[i]``."""
        view = self._layers[layer]
        view[slots, offsets, 0] = keys.to(view.device)
        view[slots, offsets, 1] = values.to(view.device)

    def gather(self, layer: int, slots: Tensor) -> Tensor:
        """A copy of whole blocks, ``[len(slots) * block_size][2][kv_head][head_dim]``, valid until the next gather.

        One buffer serves all: fresh memory for megabytes a layer costs more in page faults than the copy itself.
        """
        view = self._layers[layer]
        shape = (len(slots), *view.shape[1:])
        need = math.prod(shape)
        if need > self._scratch.numel():
            with torch.inference_mode(False):
                self._scratch = torch.empty(need, dtype=view.dtype)
        into = self._scratch[:need].view(shape)
        torch.index_select(view, 0, slots, out=into)
        return into.flatten(0, 1)


def _inner(geometry: Geometry) -> tuple[int, ...]:
    return geometry.layers, geometry.block_size, 2, geometry.kv_heads, geometry.head_dim


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
