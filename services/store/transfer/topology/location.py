"""Where registered memory lies: ``cpu:N`` on a NUMA node, ``cuda:N`` at a GPU, ``cpu`` anywhere on this server."""

from __future__ import annotations

import re

from shared.errors import InvalidInput

LOCATION = re.compile(r"(cpu|cuda):(0|[1-9]\d{0,3})")
ANYWHERE = "cpu"


def check_location(location: str) -> None:
    """Raises InvalidInput."""
    if location != ANYWHERE and not LOCATION.fullmatch(location):
        raise InvalidInput(f"location {location!r} must be cpu:N, cuda:N or cpu", field="location")


def host_memory(buffer: object, location: str) -> memoryview:
    """Raises InvalidInput for memory that the CPU cannot address.

    ``cuda:N`` with host memory is the pinned pool through which that GPU's data is staged: the NICs near to the GPU are
    preferred for it. The GPU's own memory (anything with a ``__cuda_array_interface__``) needs GPUDirect RDMA, which no
    transport here has; it is refused, not copied behind the caller's back.
    """
    if hasattr(buffer, "__cuda_array_interface__"):
        raise InvalidInput(
            "this is memory of a GPU, which no transport reaches without GPUDirect RDMA: copy it to and from host "
            f"memory registered at {location}",
            field="buffer",
        )
    try:
        return memoryview(buffer).cast("B")  # type: ignore[arg-type]  # whatever has no buffer is what is asked here
    except TypeError as e:
        raise InvalidInput(f"memory to register must be a contiguous buffer: {e}", field="buffer") from e
