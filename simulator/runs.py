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
    """Raises ValueError naming the field, its value and the limit, or the policies there are."""
    try:
        made = msgspec.convert(settings, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(_named(str(error), settings)) from None
    name = getattr(made, "policy", None)
    if name is not None and name not in POLICIES:
        raise ValueError(f"there is no policy {name!r}; there are {', '.join(sorted(POLICIES))}")
    return made


def _named(said: str, settings: Mapping[str, Any]) -> str:
    """With the value beside the field that is named in the end: ``... - at `$.hardware.nic```."""
    limit, at, path = said.partition(" - at `$.")
    value: Any = settings
    for name in path.rstrip("`").split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return f"{path.rstrip('`')}: {value!r}: {limit}" if at and value is not None else said


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
