"""A load in figures: what was served, how fast, how much of it within the objectives. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cli.load.outcome import End, Outcome
from shared.workload.measures import quantile, summary

PAPER_TBTS_MS = (100, 200, 300)
LATE_S = 0.02
"""A generator whose 99th percentile of lateness is above this says so: it, too, may be what was measured."""


@dataclass(frozen=True)
class Objective:
    """Seconds: to the first token, and between tokens."""

    ttft: float
    tbt: float


def report(outcomes: Sequence[Outcome], objective: Objective, seconds: float) -> dict[str, Any]:
    """All figures by name; None where nothing was measured. ``seconds``: from the first arrival to the last answer.

    Shares are of the requests that ended: whoever stops a load makes no errors by that.
    """
    ended = [outcome for outcome in outcomes if outcome.end is not End.UNFINISHED]
    answered = [outcome for outcome in ended if outcome.end is End.OK]
    good = [outcome for outcome in answered if outcome.meets(objective.ttft, objective.tbt)]
    arrivals = max((outcome.due for outcome in outcomes), default=0.0)
    return {
        **_counts(outcomes),
        "seconds": seconds,
        "arrivals_s": arrivals,
        "offered_rps": len(outcomes) / arrivals if arrivals else None,
        **summary("ttft", [o.ttft for o in answered if o.ttft is not None]),
        **summary("tbt", [o.tbt for o in answered if o.tbt is not None]),
        **summary("mean_gap", [o.mean_gap for o in answered if o.mean_gap is not None]),
        **summary("request", [o.ended - o.due for o in answered]),
        "slo_ttft_s": objective.ttft,
        "slo_tbt_s": objective.tbt,
        "effective": _share(len(good), len(ended)),
        "effective_requests": len(good),
        "effective_of_accepted": _share(len(good), len(answered)),
        "effective_by_tbt": {
            f"{ms}ms": _share(sum(o.meets(objective.ttft, ms / 1000) for o in answered), len(ended))
            for ms in PAPER_TBTS_MS
        },
        "goodput_rps": len(good) / seconds if seconds else None,
        **_tokens(answered, seconds),
        **_refusals(outcomes),
        **_lateness(outcomes),
    }


def _counts(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    ends = Counter(outcome.end for outcome in outcomes)
    return {
        "requests": len(outcomes),
        "completed": ends[End.OK],
        "rejected": ends[End.REJECTED],
        "errors": ends[End.ERROR],
        "unfinished": ends[End.UNFINISHED],
        "errors_by_kind": dict(Counter(o.error for o in outcomes if o.end is End.ERROR).most_common(20)),
    }


def _tokens(answered: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Hits only of answers that tell them."""
    telling = [outcome for outcome in answered if outcome.cached_tokens is not None]
    output = sum(outcome.completion_tokens for outcome in answered)
    return {
        "prompt_tokens": sum(outcome.prompt_tokens for outcome in answered),
        "completion_tokens": output,
        "uncounted": sum(not outcome.prompt_tokens for outcome in answered),
        "completion_tokens_per_s": output / seconds if seconds else None,
        "hit_by_token": _share(sum(o.cached_tokens or 0 for o in telling), sum(o.prompt_tokens for o in telling)),
    }


def _refusals(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """``retries``: attempts after a 429 that was obeyed, and how many of them were not refused again."""
    refusals = sorted(seconds for outcome in outcomes for seconds in outcome.refusals)
    again = [outcome for outcome in outcomes if outcome.tries > 1]
    retries = sum(outcome.tries - 1 for outcome in again)
    accepted = sum(outcome.end not in (End.REJECTED, End.UNFINISHED) for outcome in again)
    return {
        "answers_429": len(refusals),
        "refusal_p50_s": quantile(refusals, 0.5) if refusals else None,
        "refusal_p99_s": quantile(refusals, 0.99) if refusals else None,
        "retries": retries,
        "retries_accepted": accepted,
        "retry_acceptance": _share(accepted, retries),
    }


def _lateness(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    late = sorted(outcome.late for outcome in outcomes)
    p99 = quantile(late, 0.99) if late else None
    return {
        "late_p50_s": quantile(late, 0.5) if late else None,
        "late_p99_s": p99,
        "late_max_s": late[-1] if late else None,
        "generator_late": p99 is not None and p99 > LATE_S,
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
