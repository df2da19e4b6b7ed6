"""Accepted and then missed: an answer is held against its request's own objectives, or else the configured ones."""

from __future__ import annotations

import pytest

from services.conductor.gateway.errors import Fault
from services.conductor.gateway.exchange import Exchange
from services.conductor.gateway.objectives import Objectives

CONFIGURED = (1.0, 0.1)


def exchange(first: float | None, slowest: float | None, wanted: Objectives) -> Exchange:
    return Exchange("u", "i", "completions", 0.0, objectives=wanted, first=first, slowest=slowest)


@pytest.mark.parametrize(
    ("wanted", "first", "slowest", "verdict"),
    [
        (Objectives(), 0.9, 0.09, "met"),
        (Objectives(), 1.1, 0.09, "ttft_missed"),
        (Objectives(), 0.9, 0.11, "tbt_missed"),
        (Objectives(ttft_ms=500), 0.9, 0.09, "ttft_missed"),  # stricter than configured
        (Objectives(tbt_ms=50), 0.9, 0.09, "tbt_missed"),
        (Objectives(ttft_ms=5000, tbt_ms=500), 4.0, 0.4, "met"),  # laxer
        (Objectives(ttft_ms=5000), 4.0, 0.11, "tbt_missed"),  # each for itself
        (Objectives(), None, None, "ttft_missed"),  # an answer without a token
        (Objectives(), 0.9, None, "met"),  # of a single one
    ],
)
def test_effective_is_what_met_the_objectives_it_asked_for(
    wanted: Objectives, first: float | None, slowest: float | None, verdict: str
) -> None:
    assert exchange(first, slowest, wanted).verdict(*CONFIGURED) == verdict


def test_what_was_refused_cancelled_or_wrong_is_no_miss() -> None:
    ends = {
        "refused": Fault(429, "rate_limit_error", "contended", "busy"),
        "failed": Fault(502, "server_error", "attempt_failed", "broken"),
        "": Fault(400, "invalid_request_error", "invalid_input", "wrong"),
    }
    for verdict, fault in ends.items():
        one = exchange(None, None, Objectives())
        one.failed(fault)
        assert one.verdict(*CONFIGURED) == verdict
    gone = exchange(0.1, 0.01, Objectives())
    gone.cancelled()
    assert gone.verdict(*CONFIGURED) == "cancelled"
