"""The file of API keys: key -> tenant -> salt. Keys are never kept or logged in clear."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import yaml
from msgspec import Meta

from shared.errors import ConfigError

HASHED = "sha256:"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same in C: the event loop waits for it
CONFUSED = (ValueError, LookupError, AttributeError, RecursionError)  # of the library, over `2020-13-45`


@dataclass(frozen=True)
class Tenant:
    """``salt`` goes into the namespace of its blocks: tenants with different salts never share one."""

    name: str = ""
    salt: str = ""


class TenantEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``keys``: in clear, or as ``sha256:<hex of the key's digest>``. ``salt`` defaults to one made of the name."""

    keys: Annotated[list[Annotated[str, Meta(min_length=8)]], Meta(min_length=1)]
    salt: str = ""


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenants: dict[Annotated[str, Meta(min_length=1, max_length=64)], TenantEntry]


class KeyRing:
    """Tenant by key. Digests are blinded with a secret of this process, so that the time of a look-up says nothing
    about any key."""

    def __init__(self, file: KeyFile) -> None:
        self._blind = secrets.token_bytes(32)
        self._tenants: dict[bytes, Tenant] = {}
        for name, entry in file.tenants.items():
            tenant = Tenant(name, entry.salt or hashlib.sha256(b"tenant\0" + name.encode()).hexdigest())
            for key in entry.keys:
                self._add(_digest_of_entry(key, name), tenant)

    def find(self, key: str) -> Tenant | None:
        return self._tenants.get(self._blinded(hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()))

    def _add(self, digest: bytes, tenant: Tenant) -> None:
        other = self._tenants.setdefault(self._blinded(digest), tenant)
        if other is not tenant:
            raise ConfigError(f"tenants {other.name!r} and {tenant.name!r} have a key in common", field="api_keys")

    def _blinded(self, digest: bytes) -> bytes:
        return hmac.digest(self._blind, digest, "sha256")


def _digest_of_entry(key: str, tenant: str) -> bytes:
    if not key.startswith(HASHED):
        return hashlib.sha256(key.encode()).digest()
    try:
        digest = bytes.fromhex(key.removeprefix(HASHED))
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise ConfigError(f"a key of tenant {tenant!r} is no {HASHED}<64 hex digits>", field="api_keys")
    return digest


def read_key_file(path: Path) -> KeyRing:
    """Raises ConfigError; no message of it shows a key."""
    try:
        return KeyRing(msgspec.convert(yaml.load(_contents(path), LOADER), KeyFile))
    except OSError as e:
        raise ConfigError(f"cannot read the API keys in {path}: {e.strerror}", field="api_keys") from None
    except yaml.YAMLError as e:
        where = getattr(e, "problem_mark", None)
        line = f" (line {where.line + 1})" if where else ""
        raise ConfigError(f"{path} is no YAML{line}", field="api_keys") from None
    except msgspec.ValidationError as e:
        raise ConfigError(f"{path}: {e}", field="api_keys") from None
    except CONFUSED as e:
        raise ConfigError(f"{path} has a value that YAML cannot read ({type(e).__name__})", field="api_keys") from None


def _contents(path: Path) -> bytes:
    """Of a file only: to open a pipe would wait for whoever writes into it."""
    if not path.is_file() and path.exists():
        raise ConfigError(f"{path}, which is to hold the API keys, is no file", field="api_keys")
    return path.read_bytes()
