"""A first latency model in a few small steps, when an instance starts. ``mooncake calibrate`` measures more, longer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from shared.engines.base import Draw, Engine, PoolMap, Timed, Work
from shared.engines.private_pool import anonymous_pool
from shared.latency import DecodeModel, DecodeSample, PrefillModel, PrefillSample, fit_decode, fit_prefill
from shared.messages import Sampling

GREEDY = Sampling(max_tokens=1, seed=0, temperature=0.0)
WARM_UP = (16, 0)
SLOTS = 64  # long contexts are made of these again and again: what they hold does not change the time

# most telling first: the budget may end anywhere after the first LEAST, which leave no coefficient open
LEAST = 3
PREFILL = ((32, 0), (128, 0), (1056, 1024), (256, 0), (2080, 2048))
DECODE = ((1, 64), (8, 64), (4, 1024), (1, 2048), (16, 64))


Clock = Callable[[], float]


def clock_of(engine: Engine, threads: int, device: str) -> Clock:
    """What an engine's time is measured with: CPU time of this thread where it computes on this thread alone, so that
    neighbours do not count."""
    alone = threads == 1 and device == "cpu" and not isinstance(engine, Timed)
    return time.thread_time if alone else time.perf_counter


def quick_calibrate(
    engine: Engine, pool: PoolMap | None = None, budget_s: float = 2.0, clock: Clock = time.perf_counter
) -> tuple[PrefillModel, DecodeModel]:
    """Measure and fit both models. Blocking, on the compute thread, about ``budget_s`` seconds.

    Runs over a private pool; afterwards the engine is bound to ``pool``, or to none. An engine that computes on
    this thread alone is timed with ``clock=time.thread_time``: neighbours that start at the same time then do not make
    one of several equal instances look slower than the others.
    """
    with anonymous_pool(engine.namespace.geometry, SLOTS) as private:
        engine.bind(private)
        try:
            _prefill_seconds(engine, *WARM_UP, clock)
            _decode_seconds(engine, 1, 64, clock)
            return _measure(engine, budget_s, clock)
        finally:
            engine.unbind()
            if pool is not None:
                engine.bind(pool)


def _measure(engine: Engine, budget_s: float, clock: Clock) -> tuple[PrefillModel, DecodeModel]:
    prefills, decodes = list[PrefillSample](), list[DecodeSample]()
    until = time.perf_counter() + budget_s
    longest = engine.context_length - 1
    for number, ((n, p), (batch, context)) in enumerate(zip(PREFILL, DECODE, strict=True)):
        if number >= LEAST and time.perf_counter() > until:
            break
        if n <= longest or not prefills:
            n, p = min(n, longest), min(p, longest - 1)
            prefills.append(PrefillSample(n, p, _prefill_seconds(engine, n, p, clock)))
        context = min(context, longest)
        seconds = min(_decode_seconds(engine, batch, context, clock) for _ in range(2))
        decodes.append(DecodeSample(batch, batch * context, seconds))
    return fit_prefill(prefills), fit_decode(decodes)


def _prefill_seconds(engine: Engine, n: int, p: int, clock: Clock) -> float:
    """As the last chunk of a prompt of ``n`` tokens, ``p`` of them there already."""
    return _seconds(engine, [Work(tokens(n - p), p, slots(engine, n, 0), Draw(GREEDY, 0))], clock)


def _decode_seconds(engine: Engine, batch: int, context: int, clock: Clock) -> float:
    rows = range(batch)
    works = [Work(tokens(1), context - 1, slots(engine, context, i), Draw(GREEDY, 1)) for i in rows]
    return _seconds(engine, works, clock)


def _seconds(engine: Engine, batch: Sequence[Work], clock: Clock) -> float:
    started = clock()
    engine.step(batch)
    return clock() - started


def tokens(count: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Any tokens: which ones does not change the time."""
    return (np.arange(count, dtype=np.uint32) % 97) + 3


def slots(engine: Engine, tokens: int, first: int) -> list[int]:
    """For a context of so many tokens, of the ``SLOTS`` that there are; sequence ``first`` begins elsewhere."""
    blocks = engine.namespace.geometry.blocks(tokens)
    return [(first * 7 + i) % SLOTS for i in range(blocks)]
