"""What a gateway is told of itself when it starts."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.conductor.gateway.objectives import Allowed


@dataclass(frozen=True)
class GatewayOptions:
    """``model``: the name that is served. ``tokenizer_print``: fingerprint to compare with the instances'. Seconds and
    bytes; ``default_max_tokens`` caps an answer whose request names no limit. ``trace_slow``: seconds to the first
    token from which on a trace is sent whatever the sampler says, as one that missed an objective is; 0 for never.
    ``slo_ttft``, ``slo_tbt``: objectives of requests that name none; ``objectives``: what they may name.
    ``trace_content``: prompts and answers are attributes of their spans."""

    model: str
    tokenizer_print: str = ""
    default_max_tokens: int = 4096
    max_body_bytes: int = 10 * 2**20
    body_timeout: float = 60.0
    request_timeout: float = 3600.0
    trace_slow: float = 0.0
    slo_ttft: float = 30.0
    slo_tbt: float = 0.2
    objectives: Allowed = field(default_factory=Allowed)
    trace_content: bool = False
