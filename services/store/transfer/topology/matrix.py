"""The topology matrix of a server: for each memory location its preferred and its secondary NICs. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from services.store.transfer.topology.location import ANYWHERE, LOCATION
from shared.errors import ConfigError

MOST = 1024
"""Locations of one server, and NICs of one location, at most: the matrix travels in the agent's record."""

Document = dict[str, list[list[str]]]
"""The paper's form: ``{"cpu:0": [[preferred NICs], [secondary NICs]], "cuda:0": ...}``."""


class Tiers(NamedTuple):
    """NICs for one location. No NIC is in both. ``preferred`` may be empty: the secondary ones serve at once then."""

    preferred: tuple[str, ...] = ()
    secondary: tuple[str, ...] = ()


@dataclass(frozen=True)
class Matrix:
    """``cpu:N`` is the memory of NUMA node N, ``cuda:N`` that of GPU N. Immutable."""

    tiers: Mapping[str, Tiers] = field(default_factory=dict)

    @property
    def nics(self) -> tuple[str, ...]:
        """All NICs named anywhere, in order of first mention."""
        return tuple(dict.fromkeys(nic for tiers in self.tiers.values() for tier in tiers for nic in tier))

    def at(self, location: str) -> Tiers:
        """Of a location the matrix does not name nothing is known: every NIC is as good as any other."""
        return self.tiers[location] if location in self.tiers else Tiers(self.nics)

    @property
    def memory(self) -> str:
        """The location of memory of this server that nobody bound to a NUMA node: "cpu:0" where there is only that one,
        else "cpu", to which every NIC is as near as any other."""
        return "cpu:0" if [name for name in self.tiers if name.startswith("cpu:")] == ["cpu:0"] else ANYWHERE

    def format(self) -> Document:
        return {location: [list(tier) for tier in tiers] for location, tiers in self.tiers.items()}

    @staticmethod
    def parse(document: object, *, source: str = "topology", known: Collection[str] | None = None) -> Matrix:
        """From the paper's form. ``known``: the NICs this server has; any other is refused. Raises ConfigError that
        names ``source`` and the field."""
        if not isinstance(document, Mapping):
            raise ConfigError(f"{source}: must map locations to [[preferred NICs], [secondary NICs]]", field="topology")
        if len(document) > MOST:
            raise ConfigError(f"{source}: {len(document)} locations, at most {MOST} are taken", field="topology")
        return Matrix({_location(key, source): _tiers(key, tiers, source, known) for key, tiers in document.items()})


def _location(key: object, source: str) -> str:
    if not isinstance(key, str) or not LOCATION.fullmatch(key):
        raise ConfigError(f"{source}: location {key!r} must be cpu:N or cuda:N", field=str(key)[:64])
    return key


def _tiers(location: str, value: object, source: str, known: Collection[str] | None) -> Tiers:
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(isinstance(t, list | tuple) for t in value):
        raise ConfigError(f"{source}: {location} must be [[preferred NICs], [secondary NICs]]", field=location)
    seen: set[str] = set()
    for number, nic in ((number, nic) for number, tier in enumerate(value) for nic in tier):
        where = f"{source}: {location}[{number}]"
        if not isinstance(nic, str) or not nic or len(nic) > 64:
            raise ConfigError(f"{where}: {nic!r} must be a NIC's name of 1..64 characters", field=location)
        if nic in seen:
            raise ConfigError(f"{where}: NIC {nic} is named twice for {location}", field=location)
        if known is not None and nic not in known:
            here = ", ".join(sorted(known)) or "none at all"
            raise ConfigError(f"{where}: unknown NIC {nic!r}; this server has {here}", field=location)
        seen.add(nic)
        if len(seen) > MOST:
            raise ConfigError(f"{where}: more than {MOST} NICs", field=location)
    return Tiers(tuple(value[0]), tuple(value[1]))
