"""Latency models: how long a prefill and a decode step take. Plain coefficients that travel in records.

Fitted by least squares on measured seconds, each sample weighted by 1/seconds so that relative errors count, with
coefficients that are never negative: a model extrapolates to prompts longer than any measured, and must not predict
that a longer one takes less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

PRIORITY_S = 1.0
"""Seconds by which a step of priority moves a deadline. It takes up a request's own slack and no more: nobody goes
before one whose own deadline has come."""


def due_in(left: float, priority: int) -> float:
    """Seconds until a request is due at prefill, which orders its queue by that: its deadline, ``left`` seconds from
    now, as moved by its priority (higher is more urgent)."""
    return max(left - priority * PRIORITY_S, min(left, 0.0))


class PrefillModel(msgspec.Struct, frozen=True):
    """Seconds to prefill a prompt of n tokens of which p are cached: base + linear*(n-p) + square*(n^2-p^2)."""

    base: float
    linear: float
    square: float

    def seconds(self, n: int, p: int) -> float:
        return self.base + self.linear * (n - p) + self.square * (n * n - p * p)


class DecodeModel(msgspec.Struct, frozen=True):
    """Seconds of one decode step: base + per_sequence*batch + per_token*kv_tokens."""

    base: float
    per_sequence: float
    per_token: float

    def seconds(self, batch: int, kv_tokens: int) -> float:
        return self.base + self.per_sequence * batch + self.per_token * kv_tokens


class PrefillSample(NamedTuple):
    """A prefill of ``n`` tokens, ``p`` of them cached, took ``seconds``."""

    n: int
    p: int
    seconds: float


class DecodeSample(NamedTuple):
    """A step over ``batch`` sequences that attended to ``kv_tokens`` tokens in all took ``seconds``."""

    batch: int
    kv_tokens: int
    seconds: float


LEAST_SHARE = 0.02


def fit_prefill(samples: Sequence[PrefillSample]) -> PrefillModel:
    """Raises ValueError without samples. Fewer than three leave coefficients at 0. Whatever noise says, tokens are
    never free: where nothing grows with them, ``LEAST_SHARE`` of the longest sample is put down to their number."""
    columns = np.array([(1.0, n - p, n * n - p * p) for n, p, _ in samples])
    base, linear, square = _fit(columns, np.array([sample.seconds for sample in samples]))
    if linear == square == 0.0:
        computed, seconds = max((sample.n - sample.p, sample.seconds) for sample in samples)
        linear = LEAST_SHARE * seconds / max(1, computed)
        base = max(0.0, base - linear * computed)
    return PrefillModel(base, linear, square)


def fit_decode(samples: Sequence[DecodeSample]) -> DecodeModel:
    """Raises ValueError without samples. Fewer than three leave coefficients at 0."""
    columns = np.array([(1.0, batch, kv_tokens) for batch, kv_tokens, _ in samples])
    return DecodeModel(*_fit(columns, np.array([sample.seconds for sample in samples])))


def prefill_r2(model: PrefillModel, samples: Sequence[PrefillSample]) -> float:
    """Coefficient of determination of the model on samples: 1 is perfect, 0 as good as their mean."""
    return _r2([(sample.seconds, model.seconds(sample.n, sample.p)) for sample in samples])


def decode_r2(model: DecodeModel, samples: Sequence[DecodeSample]) -> float:
    """Like :func:`prefill_r2`."""
    return _r2([(sample.seconds, model.seconds(sample.batch, sample.kv_tokens)) for sample in samples])


class OnlineCorrection(msgspec.Struct, frozen=True):
    """A factor on a model's predictions, learnt from what really happened: the machine is shared, slower, warmer.

    An exponential average of the logarithm of actual/predicted over about 1/``gain`` observations. One observation
    counts at most ``OUTLIER``-fold either way: a stall is no trend.
    """

    factor: float = 1.0
    gain: float = 0.1

    def observed(self, predicted: float, actual: float) -> OnlineCorrection:
        """The correction after one more observation. ``predicted`` is the model's, without this factor, in seconds.
        What is not positive and finite teaches nothing."""
        ratio = actual / predicted if predicted > 0 else 0.0
        if not 0 < ratio < math.inf:
            return self
        surprise = max(1 / OUTLIER, min(OUTLIER, ratio / self.factor))
        factor = max(1 / LIMIT, min(LIMIT, self.factor * surprise**self.gain))
        return OnlineCorrection(factor, self.gain)

    def faded(self, seconds: float) -> OnlineCorrection:
        """The correction after so many seconds in which nothing could be learnt: what it was learnt from may be over,
        and who refuses everybody for it would never see that."""
        left = 0.5 ** (max(0.0, seconds) / HALF_LIFE_S)
        return OnlineCorrection(self.factor**left, self.gain)


HALF_LIFE_S = 30.0
OUTLIER = 4.0
LIMIT = 100.0


def _fit(columns: Floats, seconds: Floats) -> tuple[float, float, float]:
    """Non-negative weighted least squares over three coefficients: the best of the at most eight subsets of them
    whose unconstrained solution is not negative, which is the exact answer."""
    if not len(seconds):
        raise ValueError("no samples to fit")
    weights = 1.0 / np.maximum(seconds, 1e-9)
    rows, goal = columns * weights[:, None], np.ones(len(seconds))
    best, least = (0.0, 0.0, 0.0), math.inf
    for kept in (subset for size in (1, 2, 3) for subset in combinations(range(3), size)):
        if len(kept) > len(seconds):
            continue
        scale = np.abs(rows[:, kept]).max(axis=0)
        scale[scale == 0] = 1.0
        found = np.linalg.lstsq(rows[:, kept] / scale, goal, rcond=None)[0] / scale
        error = float(((rows[:, kept] @ found - goal) ** 2).sum())
        if (found >= 0).all() and error < least - 1e-12:
            best, least = _spread(kept, found), error
    return best


def _spread(kept: tuple[int, ...], found: Floats) -> tuple[float, float, float]:
    values = [0.0, 0.0, 0.0]
    for place, value in zip(kept, found, strict=True):
        values[place] = float(value)
    return values[0], values[1], values[2]


def _r2(pairs: Sequence[tuple[float, float]]) -> float:
    """``pairs`` of (measured, predicted)."""
    mean = sum(measured for measured, _ in pairs) / len(pairs)
    total = sum((measured - mean) ** 2 for measured, _ in pairs)
    missed = sum((measured - predicted) ** 2 for measured, predicted in pairs)
    return 1.0 - missed / total if total > 0 else float(missed == 0)
