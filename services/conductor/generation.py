"""The seam inside the conductor: the gateway (HTTP, text) asks a dispatcher (scheduling, attempts) for tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from shared.blocks import Namespace, Tokens
from shared.messages import Output, Ref, Sampling, Usage

BYTES_PER_TOKEN = 8
"""What stage 0 takes for likely. Nothing is refused by it: a body may be escapes, blanks or other fields."""


@dataclass
class Siblings:
    """Shared by the generations of one prompt. ``home``: the prefill instance that computed it, once one has; the
    dispatcher sends those that come later there, too."""

    home: Ref | None = None


@dataclass(frozen=True)
class Generation:
    """One request as the gateway hands it over. ``id`` is unique in the mesh (never the client's id). ``keys``: chain
    of the full blocks of ``tokens`` under ``root`` (which carries the tenant's salt). ``arrived``: monotonic
    seconds. ``ticket``: what it has in common with its retry, should it be refused; 0: nothing."""

    id: str
    tokens: Tokens
    root: bytes
    keys: bytes
    sampling: Sampling
    arrived: float
    tenant: str = ""
    slo_ttft_ms: int = 0  # 0: the configured objective
    slo_tbt_ms: int = 0
    priority: int = 0  # higher is more urgent
    siblings: Siblings | None = None
    ticket: int = 0


class Token(NamedTuple):
    """One delivered token, in order, exactly once per index and choice. ``usage`` comes with the first."""

    output: Output
    usage: Usage | None = None


@dataclass(frozen=True)
class Readiness:
    """``ready``: a request would be served now. ``reasons`` are machine-readable (no_prefill, no_decode, bus_down,
    starting, draining); ``degraded`` lists what is lost without stopping service (metadata_down)."""

    ready: bool
    reasons: list[str] = field(default_factory=list)
    degraded: list[str] = field(default_factory=list)


class Dispatcher(Protocol):
    """Schedules, runs and migrates attempts. Everything it holds for a request ends with its iterator."""

    @property
    def namespace(self) -> Namespace:
        """Deployment namespace of the registered instances. Raises Unavailable while there are none."""

    @property
    def context_length(self) -> int:
        """Raises Unavailable while there are no instances."""

    def readiness(self) -> Readiness: ...

    def consider(
        self, prompt_bytes: int, slo_ttft_ms: int = 0, ticket: int = 0, prompt_tokens: int = 0, priority: int = 0
    ) -> None:
        """Stage 0 of admission, before tokenizing. ``prompt_bytes``: of the whole body; ``prompt_tokens``: so many has
        its first prompt at least; ``priority``: it is no more urgent (higher is). Raises Contended (with
        retry_after_ms) or Unavailable."""

    def generate(self, generation: Generation) -> AsyncIterator[Token]:
        """Tokens until the one with a finish reason. Raises, before the first token: Contended, Unavailable,
        DoesNotFit; at any time: AttemptFailed after the bounded number of attempts. Closing the iterator (or
        cancelling its task) cancels the attempt at its instances."""

    def cluster(self) -> dict[str, Any]:
        """JSON-able picture: instances, agents, index, loads, counters (``GET /cluster``, ``mooncake status``)."""
