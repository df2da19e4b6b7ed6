"""A run from plain settings, as files and the command line give them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from services.conductor.scheduling import POLICIES
from shared.workload.trace import TraceRequest
from simulator.cluster import Cluster
from simulator.coupled import Coupled
from simulator.request import Request
from simulator.settings import ClusterSettings, CoupledSettings

Settings = TypeVar("Settings", ClusterSettings, CoupledSettings)


def read(settings: Mapping[str, Any], kind: type[Settings]) -> Settings:
    """Raises ValueError naming the field, the value's limit, or the policies there are."""
    made = msgspec.convert(settings, kind, strict=False)
    name = getattr(made, "policy", None)
    if name is not None and name not in POLICIES:
        raise ValueError(f"there is no policy {name!r}; there are {', '.join(sorted(POLICIES))}")
    return made


def run(
    settings: Mapping[str, Any], trace: Iterable[TraceRequest], progress: Callable[[int], None] | None = None
) -> list[Request]:
    """A disaggregated cluster. Raises ValueError."""
    return Cluster(read(settings, ClusterSettings)).run(trace, progress)


def coupled_run(
    settings: Mapping[str, Any], trace: Iterable[TraceRequest], progress: Callable[[int], None] | None = None
) -> list[Request]:
    """Instances that do both. Raises ValueError."""
    return Coupled(read(settings, CoupledSettings)).run(trace, progress)
