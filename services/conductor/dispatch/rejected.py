"""What a client is told whose request has no place: what was predicted, and what was allowed. Pure."""

from __future__ import annotations

import math

from services.conductor.scheduling import Objectives, Rejection
from shared.errors import Contended, DoesNotFit, MooncakeError, Unavailable


def rejected(rejection: Rejection, retry: float = 1.0, wanted: Objectives | None = None) -> MooncakeError:
    """``retry``: seconds after which to come again. ``wanted``: the objectives that were looked at; None for a request
    that was accepted before."""
    reason = rejection.reason
    predicted, limit = round(rejection.predicted * 1000), round(rejection.limit * 1000)
    match reason:
        case "does_not_fit":
            return DoesNotFit("prompt and output are larger than the KV pool of any decode instance")
        case "no_prefill" | "no_decode":
            return Unavailable(f"{reason}: no instance to serve the request", field=reason, retry_after_ms=1000)
        case "ttft" if wanted:
            why = late("the first token", rejection.predicted, wanted.ttft)
            if rejection.limit < wanted.ttft:
                why += f", of which 'admission_thrift' allows a prompt of this length {rejection.limit:.3g} s"
        case "tbt" if wanted:
            why = late("the time between tokens", rejection.predicted, rejection.limit)
            if rejection.limit < wanted.tbt:
                why += " of a request beside it"
        case _:
            why = "no decode instance has room for prompt and answer now"
    return Contended(
        f"{reason}: {why}",
        field=reason,
        retry_after_ms=max(math.ceil(retry * 1000), 1),
        predicted_ms=predicted,
        limit_ms=limit,
    )


def late(what: str, predicted: float, allowed: float) -> str:
    """Both in seconds."""
    return f"{what} would take {predicted:.3g} s, the objective is {allowed:.3g} s"
