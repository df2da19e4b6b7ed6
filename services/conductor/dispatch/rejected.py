"""What a client is told whose request has no place: what was predicted, and what was allowed. Pure."""

from __future__ import annotations

from services.conductor.scheduling import Objectives, Rejection
from shared.errors import Contended, DoesNotFit, MooncakeError, Unavailable


def rejected(rejection: Rejection, wanted: Objectives | None = None) -> MooncakeError:
    """``wanted``: the objectives that were looked at; None for a request that was accepted before."""
    retry = max(int(rejection.retry_after * 1000), 1)
    match rejection.reason:
        case "does_not_fit":
            return DoesNotFit("prompt and output are larger than the KV pool of any decode instance")
        case "no_prefill" | "no_decode":
            return Unavailable(f"{rejection.reason}: no instance to serve the request", retry_after_ms=1000)
        case "ttft" if wanted:
            why = late("the first token", rejection.ttft, wanted.ttft)
        case "tbt" if wanted:
            why = late("the time between tokens", rejection.tbt, wanted.tbt)
        case _:
            why = "no decode instance has room for prompt and answer now"
    return Contended(f"{rejection.reason}: {why}", field=rejection.reason, retry_after_ms=retry)


def late(what: str, predicted: float, allowed: float) -> str:
    """Both in seconds."""
    return f"{what} would take {predicted:.3g} s, the objective is {allowed:.3g} s"
