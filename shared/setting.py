"""One setting: a field of a settings type as people and the parser see it, and how its value is read from text."""

from __future__ import annotations

import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shared.errors import ConfigError

PREFIX = "MOONCAKE_"

SECRET = {"secret": True}
"""``Meta(extra=SECRET)``: never shown, neither in errors nor in documentation."""

UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Setting:
    """One field of a settings type, as people and the parser see it."""

    name: str
    annotation: Any
    default: Any
    required: bool
    description: str
    limits: str
    kind: str
    secret: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()


def settings_of(kind: type[msgspec.Struct]) -> list[Setting]:
    """The fields of ``kind`` in declaration order, those of base classes first."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return [_setting(field, hints[field.name]) for field in msgspec.structs.fields(kind)]


def _setting(field: msgspec.structs.FieldInfo, annotation: Any) -> Setting:
    metas = _metas(annotation)
    default = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    return Setting(
        name=field.name,
        annotation=annotation,
        default=default,
        required=default is msgspec.NODEFAULT,
        description=" ".join(meta.description for meta in metas if meta.description),
        limits=", ".join(filter(None, (_limits(meta) for meta in metas))),
        kind=_kind(annotation),
        secret=any((meta.extra or {}).get("secret") for meta in metas),
    )


def _metas(annotation: Any) -> list[Meta]:
    return [meta for meta in getattr(annotation, "__metadata__", ()) if isinstance(meta, Meta)]


def _limits(meta: Meta) -> str:
    """``>= 16, <= 512``: the limits of a field in words."""
    signs = (("ge", ">= "), ("gt", "> "), ("le", "<= "), ("lt", "< "), ("multiple_of", "multiple of "))
    parts = [sign + format(getattr(meta, name), "") for name, sign in signs if getattr(meta, name) is not None]
    if meta.pattern:
        parts.append(f"matches {meta.pattern}")
    return ", ".join(parts)


def bare_type(annotation: Any) -> Any:
    """The type without ``Annotated`` and ``| None``."""
    if typing.get_origin(annotation) is Annotated:
        return bare_type(typing.get_args(annotation)[0])
    members = [member for member in typing.get_args(annotation) if member is not type(None)]
    if type(None) in typing.get_args(annotation) and len(members) == 1:
        return bare_type(members[0])
    return annotation


def _optional(annotation: Any) -> bool:
    if typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    return type(None) in typing.get_args(annotation)


def _kind(annotation: Any) -> str:
    """Type of a setting in words: ``int``, ``true or false``, ``a, b or c``, ``list of str``."""
    bare = bare_type(annotation)
    if bare is bool:
        return "true or false"
    if typing.get_origin(bare) is Literal:
        return _either([str(choice) for choice in typing.get_args(bare)])
    if isinstance(bare, type) and hasattr(bare, "__members__"):
        return _either([str(member.value) for member in bare.__members__.values()])
    if is_list(bare):
        return _list_kind(typing.get_args(bare))
    return getattr(bare, "__name__", str(bare))


def _list_kind(elements: Sequence[Any]) -> str:
    """``list of int``, ``list of 2 int (>= 1)``: all elements are alike."""
    count = "" if len(elements) == 1 or elements[-1] is Ellipsis else f"{len(elements)} "
    limits = ", ".join(filter(None, map(_limits, _metas(elements[0]))))
    return f"list of {count}{_kind(elements[0])}" + (f" ({limits})" if limits else "")


def _either(choices: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))


def is_list(bare: Any) -> bool:
    return typing.get_origin(bare) in (list, tuple, set, frozenset)


def parse_bytes(text: str) -> int:
    """``"2GiB"``, ``"64m"``, ``"4096"`` -> bytes (powers of 1024). Raises ValueError."""
    match = SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no size; write 4096, 64MiB or 2GiB")
    return int(float(match[1]) * UNITS[match[2].lower()])


def convert(setting: Setting, raw: object, source: str) -> Any:
    """``raw`` (text, or what YAML made of it) as the setting's type. Raises ConfigError naming source and limit."""
    try:
        return msgspec.convert(_parsed(setting, raw), setting.annotation, strict=not isinstance(raw, str))
    except (msgspec.ValidationError, ValueError) as error:
        shown = "its value" if setting.secret else repr(raw)
        wanted = ", ".join(filter(None, (setting.kind, setting.limits)))
        why = "" if isinstance(error, msgspec.ValidationError) else f" ({error})"
        raise ConfigError(f"{source}: {shown} is refused; expected {wanted}{why}", field=setting.name) from None


def _parsed(setting: Setting, raw: object) -> object:
    bare = bare_type(setting.annotation)
    if not isinstance(raw, str):
        return raw
    if bare is int and setting.name.endswith("_bytes"):
        return parse_bytes(raw)
    if bare is bool and raw.lower() in ("yes", "no", "on", "off"):
        return raw.lower() in ("yes", "on")
    if is_list(bare):
        return [part.strip() for part in raw.split(",") if part.strip()]
    if raw.lower() in ("", "none") and _optional(setting.annotation):
        return None
    return raw


def show(setting: Setting) -> str:
    """The default as it would be written on a command line; a secret only as whether there is one."""
    if setting.secret:
        return "a secret" if setting.default else "none"
    if setting.default is None or setting.default == "":
        return "none"
    if setting.name.endswith("_bytes") and isinstance(setting.default, int):
        return _size(setting.default)
    if isinstance(setting.default, bool):
        return str(setting.default).lower()
    if isinstance(setting.default, (list, tuple, set, frozenset)):
        return ",".join(map(str, setting.default)) or "none"
    return str(getattr(setting.default, "value", setting.default))


def _size(count: int) -> str:
    """In the largest unit that divides it: ``512MiB``."""
    for unit in ("", "KiB", "MiB", "GiB"):
        if not count or count % 1024:
            return f"{count}{unit}"
        count //= 1024
    return f"{count}TiB"
