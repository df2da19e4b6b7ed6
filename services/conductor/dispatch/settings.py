"""Settings of scheduling and dispatch; the conductor's own settings extend them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from shared.config import CommonSettings

PolicyName = Literal["global_cache", "paper", "least_loaded", "local_cache", "round_robin", "random"]
Seconds = Annotated[float, Meta(gt=0)]


class DispatchSettings(CommonSettings, frozen=True, kw_only=True):
    policy: Annotated[PolicyName, Meta(description="How instances are chosen.")] = "global_cache"
    kvcache_balancing_threshold: Annotated[
        float, Meta(description="A prefix is fetched only when it is this many times longer than the own one.", gt=0)
    ] = 1.0
    queue_overtake: Annotated[
        float,
        Meta(
            description="At prefill, a prompt may be overtaken by those that come up to this many times its own "
            "compute after it, within its objective: short ones wait less, long ones more. 0: by objective alone.",
            ge=0,
            le=100,
        ),
    ] = 0.0
    admission_thrift: Annotated[
        float,
        Meta(
            description="How much less than others a long prompt may have to wait and still be accepted: the slack "
            "that its compute leaves of its objective is divided by 1 + this * compute / objective. 0: as much.",
            ge=0,
            le=1000,
        ),
    ] = 0.0
    slo_ttft_ms: Annotated[int, Meta(description="Objective for the time to the first token.", ge=1)] = 30_000
    slo_tbt_ms: Annotated[int, Meta(description="Objective for the time between tokens.", ge=1)] = 200
    expected_output: Annotated[
        int, Meta(description="Output tokens to plan for where the request allows more.", ge=1)
    ] = 256
    link_rate: Annotated[
        float, Meta(description="Bytes per second assumed of a link that nobody has measured yet.", gt=0)
    ] = 1e9
    hot_rate: Annotated[
        float,
        Meta(description="Requests a second of one prefix for which a copy of its own is kept; 0: no copies.", ge=0),
    ] = 1.0
    hot_copies: Annotated[int, Meta(description="Copies of a hot prefix that are kept at most.", ge=1, le=64)] = 8
    hot_bytes_per_s: Annotated[
        int, Meta(description="Bytes per second that are copied at most to keep hot prefixes.", ge=1)
    ] = 256 << 20
    hot_cool_s: Annotated[
        Seconds, Meta(description="Copies of a prefix that has cooled down are dropped after so long.")
    ] = 30.0
    max_attempts: Annotated[int, Meta(description="Attempts at a request before it fails.", ge=1, le=100)] = 5
    ask_timeout_s: Annotated[Seconds, Meta(description="Wait for an answer of an instance before asking again.")] = 1.0
    ask_patience_s: Annotated[Seconds, Meta(description="Unanswered for so long counts as a refusal.")] = 10.0
    silence_s: Annotated[Seconds, Meta(description="Silence of a stream after which its tokens are asked for.")] = 2.0
    stall_s: Annotated[Seconds, Meta(description="A stream without a new token for so long is moved.")] = 60.0
    suspect_after_s: Annotated[Seconds, Meta(description="Silent for so long: an instance gets no new work.")] = 3.0
    dead_after_s: Annotated[Seconds, Meta(description="Silent for so long: an instance counts as dead.")] = 10.0
    hung_after_s: Annotated[
        Seconds, Meta(description="Busy without an engine step for so long: an instance counts as dead.")
    ] = 60.0
    placement_patience_s: Annotated[
        Seconds, Meta(description="How long a request that was accepted before waits for another instance.")
    ] = 20.0
    stream_patience_s: Annotated[
        Seconds, Meta(description="How long a stream that has begun waits for another instance.")
    ] = 60.0
    bus_patience_s: Annotated[Seconds, Meta(description="How long running streams wait for the bus to come back.")] = (
        60.0
    )
