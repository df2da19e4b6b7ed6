"""What is said of served requests: percentiles, TBT as the paper has it, hits of an endless cache. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

from shared.workload.trace import BLOCK, TraceRequest

WORST = 0.1
"""The share of a request's intervals between tokens whose mean is its TBT."""

POINTS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def worst_tenth(intervals: Sequence[float]) -> float | None:
    """TBT of a request: the mean of the longest tenth of its intervals, at least one of them; None without any."""
    if not intervals:
        return None
    count = math.ceil(len(intervals) * WORST)
    return math.fsum(heapq.nlargest(count, intervals)) / count


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of values in ascending order, between the two nearest ranks. Raises ValueError without values."""
    if not ordered:
        raise ValueError("no values have no quantiles")
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(name: str, values: Iterable[float]) -> dict[str, float | None]:
    """``{name}_mean_s``, ``{name}_p50_s``, ``{name}_p90_s``, ``{name}_p99_s``; None where there are no values."""
    ordered = sorted(values)
    if not ordered:
        return {f"{name}_{point}_s": None for point in ("mean", *POINTS)}
    points = {point: quantile(ordered, share) for point, share in POINTS.items()}
    return {
        f"{name}_{point}_s": value for point, value in {"mean": math.fsum(ordered) / len(ordered), **points}.items()
    }


def endless_hits(requests: Iterable[TraceRequest], block: int = BLOCK) -> float:
    """Share of input tokens whose prefix an endless cache has, looking at the order of requests alone; 0 for none."""
    seen, hit, total = set[int](), 0, 0
    for request in requests:
        known = next((i for i, hash_id in enumerate(request.hash_ids) if hash_id not in seen), len(request.hash_ids))
        seen.update(request.hash_ids)
        hit += min(known * block, request.input_tokens)
        total += request.input_tokens
    return hit / total if total else 0.0
