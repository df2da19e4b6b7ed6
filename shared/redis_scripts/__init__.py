"""Lua scripts, one file each, limited to commands of Redis 7.0 (``load`` reads them from the package)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True)
class Script:
    source: str
    sha: str


@cache
def load(name: str) -> Script:
    """The script ``name``.lua of this package."""
    source = resources.files(__name__).joinpath(f"{name}.lua").read_text("utf-8")
    return Script(source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())
