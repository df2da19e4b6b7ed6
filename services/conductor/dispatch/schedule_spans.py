"""What the span of a decision tells: the choice or the refusal, what was predicted and allowed, and the candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry.trace import Span, StatusCode

from services.conductor.scheduling import Candidate, Decision, Objectives, Rejection
from shared.telemetry import tracer


def describe(span: Span, decided: Decision | Rejection, waited: float, objectives: Objectives | None) -> None:
    """``waited``: seconds since the request arrived. ``objectives`` None: none were looked at."""
    if not span.is_recording():
        return
    if isinstance(decided, Rejection):
        refuse(span, decided.reason)
        predict(span, decided.ttft, decided.tbt)
    else:
        span.set_attribute("mooncake.prefill", decided.prefill)
        span.set_attribute("mooncake.decode", decided.decode)
        span.set_attribute("mooncake.fetch_blocks", decided.fetch_blocks)
        span.set_attribute("mooncake.prefix_blocks", decided.prefix_blocks)
        predict(span, waited + decided.ttft, decided.tbt)
    if objectives is not None:
        span.set_attribute("mooncake.objective_ttft_s", objectives.ttft)
        span.set_attribute("mooncake.objective_tbt_s", objectives.tbt)
    tell(span, decided.candidates())


def refused_early(
    reason: str, soonest: float = 0.0, allowed: float = 0.0, candidates: Callable[[], list[Candidate]] = list
) -> None:
    """A request that was refused before it was worth a decision has the span of one all the same. Seconds; 0 where
    nothing was predicted."""
    span = tracer().start_span("schedule")  # nothing happens within it that would have to find it
    if span.is_recording():
        refuse(span, reason)
        predict(span, soonest, 0.0)
        tell(span, candidates())
        if allowed:
            span.set_attribute("mooncake.objective_ttft_s", allowed)
    span.end()


def refuse(span: Span, reason: str) -> None:
    span.set_attribute("mooncake.rejected", reason)
    span.set_status(StatusCode.ERROR, reason)


def predict(span: Span, ttft: float, tbt: float) -> None:
    """Seconds from the request's arrival, and between tokens; 0 where nothing was predicted."""
    for name, seconds in (("ttft", ttft), ("tbt", tbt)):
        if seconds:
            span.set_attribute(f"mooncake.predicted_{name}_s", seconds)


def tell(span: Span, candidates: Iterable[Candidate]) -> None:
    for candidate in candidates:
        span.add_event(
            "candidate",
            {
                "instance": candidate.instance,
                "own_blocks": candidate.own_blocks,
                "fetch_blocks": candidate.fetch_blocks,
                "queue_s": candidate.queue,
                "price_s": candidate.price,
            },
        )
