"""What a client wants of this one request, by header: its latency objectives and its urgency. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from services.conductor.gateway.body import clip
from shared.errors import InvalidInput

TTFT, TBT, PRIORITY = "X-Slo-Ttft-Ms", "X-Slo-Tbt-Ms", "X-Priority"
RANGES = {TTFT: (1, 86_400_000), TBT: (1, 86_400_000), PRIORITY: (-1000, 1000)}
_INTEGER = re.compile(r"-?[0-9]{1,9}")


@dataclass(frozen=True)
class Objectives:
    """Milliseconds; 0 is the configured objective. A higher ``priority`` is more urgent."""

    ttft_ms: int = 0
    tbt_ms: int = 0
    priority: int = 0


def objectives(headers: Mapping[str, str]) -> Objectives:
    """Raises InvalidInput, naming header, value and range."""
    return Objectives(*(_value(headers.get(name), name) for name in (TTFT, TBT, PRIORITY)))


def _value(text: str | None, name: str) -> int:
    if text is None:
        return 0
    low, high = RANGES[name]
    if not _INTEGER.fullmatch(text) or not low <= int(text) <= high:
        header = name.lower()
        message = f"the header '{header}' must be an integer from {low} to {high}; the request has {clip(text)!r}"
        raise InvalidInput(message, field=header)
    return int(text)
