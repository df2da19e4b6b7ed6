"""Settings of the conductor: those of every service, of scheduling, and of its HTTP API."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from services.conductor.dispatch.settings import DispatchSettings, Seconds
from services.conductor.gateway.objectives import Allowed, Range

Milliseconds = Annotated[int, Meta(ge=1, le=86_400_000)]
Span = tuple[Milliseconds, Milliseconds]


class ConductorSettings(DispatchSettings, frozen=True, kw_only=True):
    host: Annotated[str, Meta(description="Address that serves the API.")] = "127.0.0.1"
    port: Annotated[int, Meta(description="Port that serves the API; 0 picks a free one.", ge=0, le=65535)] = 8000
    reuse_port: Annotated[
        bool,
        Meta(description="Other conductors of this machine may serve the same port: the kernel spreads connections."),
    ] = False
    id: Annotated[
        str, Meta(description="Identity in the mesh; empty makes one.", pattern=r"^[A-Za-z0-9_-]{0,64}\Z")
    ] = ""
    node: Annotated[str, Meta(description="Name shown for this process.")] = ""
    model: Annotated[
        str, Meta(description="Model folder or hub id, for its tokenizer; empty is the default model.")
    ] = ""
    model_wait_s: Annotated[
        float,
        Meta(
            description="How long another process may take to bring the default model, which is not fetched here then; "
            "0: it is fetched here.",
            ge=0,
            le=86400,
        ),
    ] = 0.0
    served_model_name: Annotated[
        str, Meta(description="Name that requests use; empty takes the model's.", max_length=256)
    ] = ""
    api_keys: Annotated[
        str, Meta(description="YAML file of API keys by tenant; empty serves everybody without a key.")
    ] = ""
    default_max_tokens: Annotated[
        int, Meta(description="Most tokens of an answer whose request names no limit.", ge=1)
    ] = 4096
    slo_ttft_range_ms: Annotated[
        Span, Meta(description="The strictest and the laxest `x-slo-ttft-ms` that a request may ask for.")
    ] = (1, 3_600_000)
    slo_tbt_range_ms: Annotated[
        Span, Meta(description="The strictest and the laxest `x-slo-tbt-ms` that a request may ask for.")
    ] = (1, 60_000)
    max_body_bytes: Annotated[int, Meta(description="Largest request body.", ge=1024)] = 10 * 2**20
    tokenizer_threads: Annotated[
        int, Meta(description="Threads that tokenize and hash short prompts, and as many for long ones.", ge=1, le=64)
    ] = 2
    tokenizer_backlog: Annotated[int, Meta(description="Prompts that may wait for those threads before 429.", ge=1)] = (
        4096
    )
    tokenizer_backlog_bytes: Annotated[
        int, Meta(description="Bytes of bodies that may wait for those threads before 429.", ge=1024)
    ] = 64 * 2**20
    head_timeout_s: Annotated[Seconds, Meta(description="For the head of a request to arrive.")] = 20.0
    body_timeout_s: Annotated[Seconds, Meta(description="For the body of a request to arrive.")] = 60.0
    stall_timeout_s: Annotated[
        Seconds, Meta(description="A client that reads nothing of its answer for so long is cut off.")
    ] = 60.0
    idle_timeout_s: Annotated[Seconds, Meta(description="An idle connection is closed after.")] = 75.0
    request_timeout_s: Annotated[Seconds, Meta(description="For a whole answer.")] = 3600.0
    trace_slow_ms: Annotated[
        int,
        Meta(
            description="Time to the first token from which on a trace is sent, as one with an error is, whatever the "
            "sampler says; so is one whose request missed an objective. 0: never for being slow.",
            ge=0,
        ),
    ] = 10_000
    drain_timeout_s: Annotated[float, Meta(description="After SIGTERM, for streams to end by themselves.", ge=0)] = (
        120.0
    )
    drain_delay_s: Annotated[
        float,
        Meta(description="After SIGTERM, for load balancers to see `/ready` fall before the process may exit.", ge=0),
    ] = 0.0

    def __post_init__(self) -> None:
        for name in ("slo_ttft_range_ms", "slo_tbt_range_ms"):
            least, most = getattr(self, name)
            if least > most:
                raise ValueError(f"{name} is {least},{most}: its first number must not be above the second")

    def allowed(self) -> Allowed:
        """What requests may ask for. The configured objective is always among it."""
        return Allowed(_with(self.slo_ttft_range_ms, self.slo_ttft_ms), _with(self.slo_tbt_range_ms, self.slo_tbt_ms))


def _with(span: Span, objective: int) -> Range:
    return Range(min(span[0], objective), max(span[1], objective))
