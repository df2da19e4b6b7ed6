"""What became of a trace: the figures that `mooncake simulate` prints. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.request import Request
from simulator.settings import TTFT_SLO as TTFT_SLO

TBT_THRESHOLDS = (0.1, 0.2, 0.3)


def effective(requests: Sequence[Request], tbt: float, ttft: float = TTFT_SLO) -> float:
    """Share of all requests, rejected ones too, whose TTFT and TBT are within these seconds."""
    if not requests:
        return 0.0
    return sum(one.ended == "done" and one.ttft <= ttft and one.tbt <= tbt for one in requests) / len(requests)


def report(
    requests: Sequence[Request], ttft_slo: float = TTFT_SLO, thresholds: Sequence[float] = TBT_THRESHOLDS
) -> dict[str, Any]:
    """Seconds and tokens; JSON-able. ``effective``: share by TBT threshold in ms. ``goodput``: requests within the TTFT
    objective and the largest threshold, per second of the trace. ``hit_by_token``: of served requests."""
    done = [one for one in requests if one.ended == "done"]
    arrivals = [one.trace.arrival for one in requests]
    seconds = max(arrivals) - min(arrivals) if requests else 0.0
    tokens = sum(one.trace.input_tokens for one in done)
    shares = {f"{1000 * tbt:g}": effective(requests, tbt, ttft_slo) for tbt in thresholds}
    return {
        "requests": len(requests),
        "completed": len(done),
        "rejected": len(requests) - len(done),
        "rejections": dict(sorted(Counter(one.ended for one in requests if one.ended != "done").items())),
        **_times("ttft", _column(done, lambda one: one.ttft)),
        **_times("tbt", _column([one for one in done if one.output > 1], lambda one: one.tbt)),
        "tbt_without_landing_s": _mean(_column([one for one in done if one.output > 2], lambda one: one.tbt_decode)),
        "tbt_of_all_intervals_s": _mean(_column([one for one in done if one.output > 1], lambda one: one.tbt_mean)),
        "hit_by_token": sum(one.hit for one in done) / tokens if tokens else 0.0,
        "prefill_mean_s": _mean(_column(done, lambda one: one.compute)),
        "moved_tokens": sum(one.fetched for one in done),
        "effective": shares,
        "goodput": max(shares.values(), default=0.0) * len(requests) / seconds if seconds else 0.0,
        "rate": len(requests) / seconds if seconds else 0.0,
        "replaced": sum(one.attempts > 1 for one in requests),
        "prediction_error_s": _mean(np.abs(_column(done, lambda one: one.ttft - one.predicted))),
    }


def _column(requests: Sequence[Request], value: Callable[[Request], float]) -> npt.NDArray[np.float64]:
    return np.array([value(one) for one in requests], dtype=np.float64)


def _mean(column: npt.NDArray[np.float64]) -> float:
    return float(column.mean()) if len(column) else 0.0


def _times(name: str, column: npt.NDArray[np.float64]) -> dict[str, float]:
    if not len(column):
        return {f"{name}_{what}_s": 0.0 for what in ("mean", "p50", "p90", "p99")}
    p50, p90, p99 = np.percentile(column, (50, 90, 99))
    return {
        f"{name}_mean_s": float(column.mean()),
        f"{name}_p50_s": float(p50),
        f"{name}_p90_s": float(p90),
        f"{name}_p99_s": float(p99),
    }
