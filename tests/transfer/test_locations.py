"""Where registered memory lies, and what is no memory that can be registered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from services.store.transfer.segments import Segment
from shared.errors import InvalidInput
from tests.transfer.agents import World


class OnGpu:
    """As a tensor on a GPU looks to others; the CPU cannot address it."""

    __cuda_array_interface__ = {"shape": (8,), "typestr": "|u1", "data": (0xDEAD0000, False), "version": 3}  # noqa: RUF012


@pytest.mark.parametrize("location", ["cpu:0", "cpu:13", "cuda:0", "cuda:7", "cpu"])
def test_a_location_is_a_node_a_gpu_or_anywhere(location: str) -> None:
    assert Segment("pool", memoryview(bytearray(8)), location).location == location


@pytest.mark.parametrize("location", ["", "cuda", "cpu:", "cpu:-1", "cpu:01", "cpu:0 ", "gpu:0", "cpu:99999"])
async def test_any_other_is_refused(tcp_world: World, location: str) -> None:
    agent = await tcp_world.agent()
    with pytest.raises(InvalidInput, match="must be cpu:N, cuda:N or cpu") as refused:
        agent.engine.register_local_memory(memoryview(bytearray(8)), location, name="other")
    assert refused.value.field == "location"


async def test_memory_of_a_gpu_is_refused_and_told_where_to_go(tcp_world: World) -> None:
    """No transport has GPUDirect here: it must be staged through host memory, and by somebody who knows it."""
    agent = await tcp_world.agent()
    tensor: Any = OnGpu()
    with pytest.raises(
        InvalidInput, match=r"without GPUDirect RDMA: copy it to and from host memory.*cuda:0"
    ) as refused:
        agent.engine.register_local_memory(tensor, "cuda:0", name="tensor")
    assert refused.value.field == "buffer"


def test_what_is_no_buffer_is_refused() -> None:
    thing: Any
    for thing in (object(), np.zeros((4, 4))[:, ::2]):
        with pytest.raises(InvalidInput, match="contiguous buffer"):
            Segment("pool", thing, "cpu:0")
