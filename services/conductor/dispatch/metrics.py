"""What the dispatcher measures. All labels have few values: policies, reasons and roles are the project's own words."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from services.conductor.scheduling import Decision
from shared.messages import Usage
from shared.telemetry import counter, exemplar, gauge, histogram
from shared.workload.measures import worst_tenth

DECISION = (0.00002, 0.00005, 0.0001, 0.00015, 0.0003, 0.0006, 0.0012, 0.0025, 0.005, 0.01, 0.05)
RATIO = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)

REQUESTS = counter("conductor_requests", "Requests by how they ended.", ["outcome"])
REJECTED = counter("conductor_rejections", "Requests not accepted, by reason.", ["reason"])
RETRIES = counter("conductor_retries", "Attempts left and tried again, by reason.", ["reason"])
MIGRATIONS = counter("conductor_migrations", "Attempts resumed after tokens had been delivered.")
PLACED = counter("conductor_placements", "Attempts placed, by what the prefix comes from.", ["prefix"])
DECISION_SECONDS = histogram(
    "conductor_decision_cpu_seconds", "Thread CPU time of matching, choosing and booking.", buckets=DECISION
)
TTFT_PREDICTED = histogram("conductor_predicted_ttft_seconds", "Time to first token predicted when placed.")
TTFT_ACTUAL = histogram("conductor_ttft_seconds", "Time to first token from the placement of its attempt.")
TTFT_RATIO = histogram("conductor_ttft_prediction_ratio", "Actual over predicted time to first token.", buckets=RATIO)
TBT_PREDICTED = histogram(
    "conductor_predicted_tbt_seconds", "Mean of the worst tenth of the times between tokens, predicted when placed."
)
TBT_ACTUAL = histogram(
    "conductor_tbt_seconds", "Per answer: mean of the worst tenth of the times between its tokens, from the first on."
)
TBT_RATIO = histogram(
    "conductor_tbt_prediction_ratio",
    "That mean of the worst tenth over what was predicted of it.",
    buckets=RATIO,
)
STEP_RATIO = histogram(
    "conductor_step_prediction_ratio",
    "Mean time between the tokens that decode drew, over the decode step predicted.",
    buckets=RATIO,
)
PROMPT_TOKENS = counter("conductor_prompt_tokens", "Tokens of prompts whose first token came.")
HIT_TOKENS = counter("conductor_hit_tokens", "Of these, tokens that were not computed (hit rate by token).")
LEFT_BEHIND = counter("conductor_tokens_left_behind", "Tokens not kept for slow readers; asked for again later.")
INDEX_LAG = gauge("conductor_index_lag_seconds", "Since the block index was last heard of; 0 before the first time.")
INDEX_SYNCED = gauge("conductor_index_synced", "1 while the mirror of the block index is whole.")
INSTANCES = gauge("conductor_instances", "Registered instances by role and state.", ["role", "state"])
RETURNING = gauge("conductor_virtual_queue", "Requests that were refused and told when to come back.")
TAIL = gauge("conductor_tbt_tail_seconds", "Added to a predicted step for the worst tenth of an answer's intervals.")
MARGIN = gauge("conductor_admission_margin_seconds", "Added to predicted TTFT: 95 % are no later than with it.")
RUNNING = gauge("conductor_running_requests", "Accepted requests that have not ended.")
HOT_KEEPER = gauge("conductor_hot_keeper", "1 while this conductor keeps the copies of hot prefixes.")
HOT_CHAINS = gauge("conductor_hot_prefixes", "Prefixes of which this conductor keeps several copies.")
HOT_BLOCKS = counter("conductor_hot_blocks", "Blocks of hot prefixes, by what became of the order.", ["outcome"])
HOT_BYTES = counter("conductor_hot_bytes", "Bytes copied to keep hot prefixes.")
CONDUCTORS = gauge("conductor_conductors", "Registered conductors, this one among them.")
OTHERS = gauge("conductor_others_promises", "Attempts of other conductors that are counted here.")
STALE = counter("conductor_stale_messages", "Messages dropped: another incarnation, or a request that is over.")

REASONS = frozenset(
    {
        "died",
        "unknown",
        "stalled",
        "draining",
        "no_room",
        "refused",
        "tombstoned",
        "stale_incarnation",
        "deadline_exceeded",
        "does_not_fit",
        "pool_full",
        "agent_gone",
        "namespace_mismatch",
        "attempt_failed",
        "internal",
        "protocol",
    }
)


def reason(code: str) -> str:
    """A label value: codes of newer peers are "other"."""
    return code if code in REASONS else "other"


def first_token(predicted: float, actual: float, tokens: int, usage: Usage | None) -> None:
    """The first token of an attempt on ``tokens`` tokens came ``actual`` seconds after it was placed."""
    TTFT_PREDICTED.observe(predicted)
    TTFT_ACTUAL.observe(actual, exemplar())
    if predicted > 0:
        TTFT_RATIO.observe(actual / predicted, exemplar())
    PROMPT_TOKENS.inc(tokens)
    HIT_TOKENS.inc(usage.cached_tokens if usage else 0)


def last_token(predicted: Decision, gaps: Sequence[float]) -> float | None:
    """An attempt is over. ``gaps``: seconds between its tokens, the first of them between prefill's and decode's.
    Returns the mean of their worst tenth, None without any."""
    tbt = worst_tenth(gaps)
    if tbt is None:
        return None
    TBT_PREDICTED.observe(predicted.tbt)
    TBT_ACTUAL.observe(tbt, exemplar())
    if predicted.tbt > 0:
        TBT_RATIO.observe(tbt / predicted.tbt, exemplar())
    if predicted.step > 0 and len(gaps) > 1:
        STEP_RATIO.observe(fmean(gaps[1:]) / predicted.step, exemplar())
    return tbt
