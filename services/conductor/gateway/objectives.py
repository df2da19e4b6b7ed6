"""What a client wants of this one request, by header: its latency objectives, within what the server allows. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from services.conductor.gateway.body import clip
from shared.errors import InvalidInput

TTFT, TBT = "X-Slo-Ttft-Ms", "X-Slo-Tbt-Ms"
_INTEGER = re.compile(r"-?[0-9]{1,9}")


@dataclass(frozen=True)
class Range:
    """Milliseconds that a request may ask for, both ends included."""

    least: int = 1
    most: int = 3_600_000


@dataclass(frozen=True)
class Allowed:
    """What requests may ask for instead of the configured objectives. Stricter is as good as laxer: one asks to be
    refused sooner, the other to be served later."""

    ttft: Range = Range()
    tbt: Range = Range(most=60_000)

    def named(self) -> dict[str, Range]:
        """Header -> its range."""
        return {TTFT: self.ttft, TBT: self.tbt}


@dataclass(frozen=True)
class Objectives:
    """Milliseconds; 0 is the configured objective."""

    ttft_ms: int = 0
    tbt_ms: int = 0


def objectives(headers: Mapping[str, str], allowed: Allowed) -> Objectives:
    """Raises InvalidInput, naming header, value and range."""
    return Objectives(*(_value(headers.get(name), name, range) for name, range in allowed.named().items()))


def _value(text: str | None, name: str, range: Range) -> int:
    if text is None:
        return 0
    if not _INTEGER.fullmatch(text) or not range.least <= int(text) <= range.most:
        header, limits = name.lower(), f"from {range.least} to {range.most}"
        message = f"the header '{header}' must be an integer {limits}; the request has {clip(text)!r}"
        raise InvalidInput(message, field=header)
    return int(text)
