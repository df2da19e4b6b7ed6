"""Settings of a service: command line flag, then ``MOONCAKE_*`` variable, then YAML file, then default.

A service declares a frozen :class:`msgspec.Struct` derived from :class:`CommonSettings`; names, limits, sentences
for people and the page of documentation all come from its fields. The field ``pool_bytes`` is the flag
``--pool-bytes``, the variable ``MOONCAKE_POOL_BYTES`` and the YAML key ``pool_bytes``, at the top of the file or in
the section of the service.
"""

from __future__ import annotations

import difflib
import logging
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import yaml
from msgspec import Meta

from shared.errors import ConfigError
from shared.setting import PREFIX, SECRET, Setting, bare_type, convert, settings_of, show

__all__ = ["SECRET", "CommonSettings", "load", "settings_of"]

SECTIONS = ("up", "store", "prefill", "decode", "conductor")
"""Sections of a YAML file. One file can serve the whole mesh: each process reads the top and its own section."""

OWN_VARIABLES = frozenset(
    {
        "MOONCAKE_CONFIG",
        "MOONCAKE_CACHE",
        "MOONCAKE_MESH_ID",
        "MOONCAKE_URL",
        "MOONCAKE_API_KEY",
        "MOONCAKE_REDIS_SERVER",
    }
)
"""Variables that are no field of any settings type."""


LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "console", "json"]


class CommonSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What every service of a mesh has."""

    mesh: Annotated[
        str,
        Meta(
            description="Name of the mesh; meshes on one NATS and Redis do not see each other.",
            pattern=r"^[A-Za-z0-9_-]{1,64}\Z",
        ),
    ] = "default"
    nats: Annotated[str, Meta(description="URL of the NATS server, several with commas.", min_length=1)] = (
        "nats://127.0.0.1:4222"
    )
    redis: Annotated[str, Meta(description="URL of the Redis (or Valkey) server.", min_length=1)] = (
        "redis://127.0.0.1:6379/0"
    )
    registration_timeout_s: Annotated[
        float,
        Meta(
            description="Seconds that an agent or an instance tries to register at first: Redis may start later. A "
            "conductor tries on.",
            ge=0.1,
        ),
    ] = 60.0
    log_level: Annotated[LogLevel, Meta(description="Least severe log line that is written.")] = "info"
    log_format: Annotated[LogFormat, Meta(description="`auto`: coloured text on a terminal, else JSON.")] = "auto"
    trace_requests: Annotated[
        int,
        Meta(description="Requests whose spans are kept in memory for `mooncake trace`; 0: none.", ge=0, le=100_000),
    ] = 256
    metrics_host: Annotated[str, Meta(description="Address that serves `/metrics` and `/health`.")] = "127.0.0.1"
    metrics_port: Annotated[
        int, Meta(description="Port that serves them; 0 picks a free one, -1 serves none.", ge=-1, le=65535)
    ] = 0


S = TypeVar("S", bound=msgspec.Struct)


def suggestion(name: str, known: Iterable[str], prefix: str = "") -> str:
    """`` (did you mean X?)``, or nothing when no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {prefix}{close[0]}?)" if close else ""


# -- the three sources -------------------------------------------------------------------------------------


def from_flags(settings: Sequence[Setting], argv: Sequence[str]) -> dict[str, tuple[object, str]]:
    """``--name value``, ``--name=value``, for truths also ``--name`` and ``--no-name`` -> name: (raw, source)."""
    by_flag = {setting.flag: setting for setting in settings}
    negated = {"--no-" + flag[2:]: s for flag, s in by_flag.items() if bare_type(s.annotation) is bool}
    known = [*by_flag, *negated, "--config", "--help"]
    found: dict[str, tuple[object, str]] = {}
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag in negated and not equals:
            found[negated[flag].name] = (False, flag)
        elif flag not in by_flag and flag != "--config":
            raise ConfigError(
                f"unknown {'flag' if flag.startswith('-') else 'argument'} {flag}{suggestion(flag, known)}"
            )
        elif flag in by_flag and bare_type(by_flag[flag].annotation) is bool and not equals:
            found[by_flag[flag].name] = (True, flag)
        else:
            text = value if equals else next(words, None)
            if text is None:
                raise ConfigError(f"flag {flag} needs a value")
            found[by_flag[flag].name if flag in by_flag else "--config"] = (text, f"flag {flag}")
    return found


def from_variables(settings: Sequence[Setting], env: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    return {s.name: (env[s.variable], f"variable {s.variable}") for s in settings if s.variable in env}


def unknown_variables(settings: Sequence[Setting], env: Mapping[str, str]) -> list[str]:
    """``MOONCAKE_*`` variables that are no setting here, sorted."""
    known = {setting.variable for setting in settings} | OWN_VARIABLES
    return sorted(name for name in env if name.startswith(PREFIX) and name not in known)


def from_yaml(settings: Sequence[Setting], path: str, section: str) -> dict[str, tuple[object, str]]:
    """Top-level keys, then those of the service's section, which win. Unknown keys are refused."""
    document, own = _read_yaml(path), section_of(path, section)
    names = {setting.name for setting in settings}
    found: dict[str, tuple[object, str]] = {}
    for values, where in ((document, ""), (own, section + ".")):
        for key, value in values.items():
            if not where and key in SECTIONS:
                continue  # also where a setting has that name: `prefill` is a number in the section `up` only
            if key not in names:
                raise ConfigError(f"{path}: unknown key {where}{key}{suggestion(str(key), names)}", field=str(key))
            found[key] = (value, f"{path}, key {where}{key}")
    return found


def section_of(path: str, section: str) -> dict[str, object]:
    """What the file says in one section alone, without its top; {} where it has none."""
    own = _read_yaml(path).get(section) or {}
    if not isinstance(own, dict):
        raise ConfigError(f"{path}: section {section} must hold keys and values")
    return {str(key): value for key, value in own.items()}


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that is written twice; plain YAML keeps the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise ConfigError(f"line {key_node.start_mark.line + 1}: key {key} is written twice", field=str(key))
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read_yaml(path: str) -> dict[Any, Any]:
    try:
        document = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}, {error.message}", field=error.field) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must hold keys and values at its top")
    return document


# -- loading -----------------------------------------------------------------------------------------------


def load(
    kind: type[S],
    argv: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    prog: str = "",
    others: Collection[str] = (),
) -> S:
    """The settings of this process.

    ``argv`` is without the program's name. When it is not given, the process's own command line is read and a wrong
    setting ends the process with one line on stderr and exit code 2, and :func:`warn_of_ignored` is left to
    :func:`shared.telemetry.setup`; otherwise ConfigError is raised. ``--help`` prints
    the settings and exits. ``prog`` names the program there, and the YAML section of types outside ``services.*``.
    ``others``: variables that are meant for somebody else, and no reason for a warning.
    """
    env = os.environ if env is None else env
    if argv is not None:
        loaded = _load(kind, argv, env, prog, others)
        warn_of_ignored()
        return loaded
    try:
        return _load(kind, sys.argv[1:], env, prog, others)
    except ConfigError as error:
        print(f"{prog or service_name(kind) or 'mooncake'}: {error.message}", file=sys.stderr)
        sys.exit(2)


def _load(kind: type[S], argv: Sequence[str], env: Mapping[str, str], prog: str, others: Collection[str]) -> S:
    settings = settings_of(kind)
    if {"--help", "-h"} & set(argv):
        print(usage(settings, prog or service_name(kind)))
        sys.exit(0)
    flags = from_flags(settings, argv)
    path = config_file(flags, env)
    flags.pop("--config", None)
    found = from_yaml(settings, path, service_name(kind) or prog) if path else {}
    found |= from_variables(settings, env) | flags
    _note_ignored(settings, env, others)
    values = {s.name: convert(s, *found[s.name]) for s in settings if s.name in found}
    for setting in settings:
        if setting.required and setting.name not in values:
            raise ConfigError(f"{setting.flag} (or {setting.variable}) is required", field=setting.name)
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:  # what __post_init__ has against the combination
        raise ConfigError(str(error)) from None


def config_file(flags: Mapping[str, tuple[object, str]], env: Mapping[str, str]) -> str:
    """The YAML file that ``--config`` (see :func:`from_flags`), else ``MOONCAKE_CONFIG`` names; "" for none."""
    return str(flags["--config"][0]) if "--config" in flags else env.get("MOONCAKE_CONFIG", "")


def service_name(kind: type[msgspec.Struct]) -> str:
    """``services.store.settings.StoreSettings`` -> ``store``; "" for types of other packages."""
    parts = kind.__module__.split(".")
    return parts[1] if parts[0] == "services" and len(parts) > 1 else ""


_noted: set[str] = set()
_notes: list[str] = []


def _note_ignored(settings: Sequence[Setting], env: Mapping[str, str], others: Collection[str]) -> None:
    unknown = [name for name in unknown_variables(settings, env) if name not in _noted and name not in others]
    if not unknown:
        return
    _noted.update(unknown)
    bare = {setting.variable.removeprefix(PREFIX) for setting in settings}  # the prefix alone would be alike enough
    _notes.append(", ".join(name + suggestion(name.removeprefix(PREFIX), bare, PREFIX) for name in unknown))


def warn_of_ignored() -> None:
    """Logs, once, which variables no setting was found for; a process does so when its logs have been set up."""
    while _notes:
        logging.getLogger("mooncake.config").warning("ignored variables that are no setting here: %s", _notes.pop(0))


def usage(settings: Sequence[Setting], prog: str) -> str:
    """The text of ``--help``."""
    lines = [f"usage: {prog} [--config FILE.yaml] [--name value ...]", ""]
    for setting in settings:
        default = "required" if setting.required else f"default {show(setting)}"
        lines.append(f"  {setting.flag} ({', '.join(filter(None, (setting.kind, setting.limits, default)))})")
        lines.append(f"      {setting.description}")
    return "\n".join(lines)
