"""What a trace says before anything is simulated: lengths, and how much of its input one cache would find. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from shared.workload.trace import BLOCK, TraceRequest


@dataclass(frozen=True)
class TraceStats:
    """``lru``: share of input tokens found in one LRU cache of so many blocks, where only the order of requests counts.
    ``rate``: arrivals per second between the first and the last. ``unique_blocks``: different ones."""

    requests: int
    input_mean: float
    output_mean: float
    input_max: int
    seconds: float
    rate: float
    unique_blocks: int
    lru: dict[float, float]


def trace_stats(requests: Sequence[TraceRequest], capacities: Sequence[float]) -> TraceStats:
    """``capacities``: in blocks, inf too. Raises ValueError for an empty trace."""
    if not requests:
        raise ValueError("the trace is empty")
    count = len(requests)
    seconds = requests[-1].arrival - requests[0].arrival
    return TraceStats(
        requests=count,
        input_mean=sum(one.input_tokens for one in requests) / count,
        output_mean=sum(one.output_tokens for one in requests) / count,
        input_max=max(one.input_tokens for one in requests),
        seconds=seconds,
        rate=(count - 1) / seconds if seconds > 0 else math.inf,
        unique_blocks=len({block for one in requests for block in one.hash_ids}),
        lru={capacity: hit_by_token(requests, capacity) for capacity in capacities},
    )


def hit_by_token(requests: Sequence[TraceRequest], capacity: float) -> float:
    """Share of input tokens that a prefix match in one LRU pool finds. A partial last block counts by its tokens."""
    pool: OrderedDict[int, None] = OrderedDict()
    found = total = 0
    for request in requests:
        total += request.input_tokens
        found += min(matched(pool, request.hash_ids) * BLOCK, request.input_tokens)
        touch(pool, request.hash_ids, capacity)
    return found / total if total else 0.0


def matched(pool: OrderedDict[int, None], chain: Sequence[int]) -> int:
    """Leading blocks of ``chain`` that are in the pool."""
    for at, block in enumerate(chain):
        if block not in pool:
            return at
    return len(chain)


def touch(pool: OrderedDict[int, None], chain: Sequence[int], capacity: float) -> None:
    """Leaf first: a prefix is never older than its continuation."""
    for block in reversed(chain):
        pool[block] = None
        pool.move_to_end(block)
    while len(pool) > capacity:
        pool.popitem(last=False)
