"""What the gateway counts. Labels: the route, and the outcome (``ok``, ``cancelled`` or an error code)."""

from __future__ import annotations

from services.conductor.gateway.answer import Answer
from shared.telemetry import counter, exemplar, gauge, histogram

LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

REQUESTS = counter("gateway_requests", "Requests answered, by route and outcome.", ["route", "outcome"])
DURATION = histogram("gateway_request_seconds", "From a request's head to its last byte.", ["route"], LONG)
TTFT = histogram("gateway_ttft_seconds", "From a request's head to its first token, all of the way.", (), LONG)
TBT = histogram("gateway_tbt_worst_tenth_seconds", "Per choice: mean of the worst tenth of the times between tokens.")
ADDED = histogram(
    "gateway_added_seconds",
    "What the gateway adds to a stream's first token, tokenizing apart: body to hand-over, token to socket.",
    (),
    (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128),
)
TOKENIZE = histogram("gateway_tokenize_seconds", "Tokenizing and hashing, the wait for a thread included.")
PROMPT_TOKENS = counter("gateway_prompt_tokens", "Prompt tokens of answered requests.")
CACHED_TOKENS = counter("gateway_cached_prompt_tokens", "Prompt tokens that were not computed again.")
COMPLETION_TOKENS = counter("gateway_completion_tokens", "Tokens generated, of cancelled answers too.")
BY_OBJECTIVE = counter(
    "gateway_requests_by_objective",
    "Completions by how they stood to their latency objectives. result: met (effective requests), ttft_missed, "
    "tbt_missed, refused (429), failed, cancelled.",
    ["result"],
)
GOODPUT = counter("gateway_goodput_tokens", "Tokens of answers that met both objectives.")
OBJECTIVES = gauge("gateway_objective_seconds", "Configured latency objectives.", ["objective"])
STALLED = counter("gateway_stalled_readers", "Connections cut because the client read nothing for too long.")
MET = "met"
MISSED = ("ttft_missed", "tbt_missed")
for result in (MET, *MISSED, "refused", "failed", "cancelled"):
    BY_OBJECTIVE.labels(result)  # from the start: a ratio of what never happened is 0, not nothing


def observe(answer: Answer) -> None:
    """Once for every answer that had begun, when it is over."""
    COMPLETION_TOKENS.inc(answer.completion_tokens)
    for pace in answer.paces:
        if pace.ttft is not None:
            TTFT.observe(pace.ttft, exemplar())
        if (tbt := pace.tbt()) is not None:
            TBT.observe(tbt, exemplar())
    if answer.completion_tokens:
        PROMPT_TOKENS.inc(answer.prompt_tokens)
        CACHED_TOKENS.inc(answer.cached_tokens)


def judged(result: str, tokens: int) -> None:
    """A completion is over; it gave so many tokens."""
    BY_OBJECTIVE.labels(result).inc()
    if result == MET:
        GOODPUT.inc(tokens)
