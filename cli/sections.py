"""What the file of settings says to each service that ``mooncake up`` starts, and where that comes first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from cli.config_docs import settings_type
from cli.settings import UpSettings
from shared.config import from_flags, from_variables, from_yaml, section_of
from shared.errors import ConfigError
from shared.setting import convert, settings_of

SERVICES = ("store", "prefill", "decode", "conductor")
COMMON = {"mesh", "nats", "redis", "model"}
"""What all parts of one mesh share: ``up`` alone decides."""

TLS = ("data_tls_cert", "data_tls_key", "data_tls_ca")
NEEDED = {"store": ("ssd_path", "ssd_bytes", *TLS), "conductor": ("host", "port", "api_keys")}
"""Settings of a service that ``up`` must know itself, before it starts anything."""

ALIASES = {"transports": "transport"}
"""Settings that ``up`` has by another name."""


@dataclass(frozen=True)
class Sections:
    """``said``: the settings in each service's own section. ``told``: what ``up`` was told by flag or variable, which
    no file overrules."""

    said: Mapping[str, frozenset[str]] = field(default_factory=dict)
    told: frozenset[str] = frozenset()

    def decide(self, service: str, name: str) -> bool:
        """The file's section, and not ``up``, has the last word on this setting of this service."""
        own = ALIASES.get(name, name)
        return name in self.said.get(service, ()) and own in YIELDING and own not in self.told


NO_SECTIONS = Sections()
YIELDING = {setting.name for setting in settings_of(UpSettings)} - COMMON - set().union(*map(set, NEEDED.values()))


def told(argv: tuple[str, ...], env: Mapping[str, str]) -> frozenset[str]:
    """Settings of ``up`` that the command line or the environment gives."""
    own = settings_of(UpSettings)
    return frozenset({*from_flags(own, argv), *from_variables(own, env)})


def read(path: str, settings: UpSettings, told: frozenset[str]) -> tuple[UpSettings, Sections]:
    """The sections of the file at ``path``, and ``settings`` with what ``up`` must know of them. Raises ConfigError
    for whatever a service would refuse."""
    if not path:
        return settings, Sections(told=told)
    found = {service: _values(path, service) for service in SERVICES}
    needed = {
        name: found[service][name] for service, names in NEEDED.items() for name in names if name in found[service]
    }
    try:
        changed = structs.replace(settings, **{name: value for name, value in needed.items() if name not in told})
    except ValueError as error:  # what has to be set together is said in part here, in part there
        raise ConfigError(str(error)) from None
    return changed, Sections({service: frozenset(values) for service, values in found.items()}, told)


def _values(path: str, service: str) -> dict[str, Any]:
    """What the service's own section says, as values."""
    settings = settings_of(settings_type(service))
    try:
        found = from_yaml(settings, path, service)
        values = {s.name: convert(s, *found[s.name]) for s in settings if s.name in found}
    except ConfigError as error:
        raise ConfigError(f"{error.message} (read for {service})", field=error.field) from None
    return {name: value for name, value in values.items() if name in section_of(path, service)}
