"""What this process holds, as its gauges say."""

from __future__ import annotations

from collections import defaultdict

from shared.telemetry import HELD


def held_now() -> dict[str, float]:
    """Kind -> amount, over all labels."""
    totals: defaultdict[str, float] = defaultdict(float)
    for key, amount in HELD.now().items():
        totals[dict(key)["kind"]] += amount
    return dict(totals)
