"""What is simulated: hardware, models, the cluster's shape, its policy and what befalls it."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.latency import DecodeModel, PrefillModel
from simulator.cost import LLAMA3_70B

GBPS = 1e9 / 8

TTFT_SLO = 30.0
"""The paper's objective for the time to the first token, in seconds."""

PREFILL = PrefillModel(0.0, 0.119 / 1024, 7.55e-4 / 1024**2)
"""Seconds of a LLaMA3-70B prefill on eight A800: fitted to the paper's Fig. 14 (8k 1.0 s, 128k 27.6 s)."""

DECODE = DecodeModel(0.0241, 0.0022, 3.6e-8)
"""Seconds of its decode step. Fig. 14 has 26.6 ms a token at a context of 8k and 30.9 at 128k, alone in the batch; what
a further sequence adds is fitted to the TBT of Fig. 15 with 8 to 11 decode nodes."""


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node and the model on it. Rates in bytes per second, sizes in tokens.

    ``nic``: what the node's NICs carry, each way. ``hbm``: for KV beside the weights; ``dram``, ``ssd``: of the pool.
    """

    name: str = "LLaMA3-70B on 8xA800"
    prefill: PrefillModel = PREFILL
    decode: DecodeModel = DECODE
    bytes_per_token: Annotated[int, Meta(ge=1)] = LLAMA3_70B.bytes_per_token
    layers: Annotated[int, Meta(ge=1)] = LLAMA3_70B.layers
    nic: Annotated[float, Meta(gt=0)] = 87e9
    hbm: Annotated[int, Meta(ge=1)] = 1_000_000
    dram: Annotated[int, Meta(ge=0)] = 3_000_000
    ssd: Annotated[int, Meta(ge=0)] = 0
    ssd_rate: Annotated[float, Meta(gt=0)] = 6e9


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node dies at ``at`` seconds, with all that it holds, and is back, empty, ``down`` seconds later. Conductors
    know after ``seen`` seconds."""

    node: str
    at: Annotated[float, Meta(ge=0)]
    down: Annotated[float, Meta(gt=0)] = math.inf
    seen: Annotated[float, Meta(ge=0)] = 0.5


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A disaggregated cluster.

    ``prefill``, ``decode``: nodes. ``group``: prefill nodes that compute a prompt together, in chunks of
    ``chunk`` tokens (chunked pipeline parallelism); they are one instance. A chunk's blocks are there for all to use
    when it is computed. ``decode_cache``: decode nodes keep what
    landed there, send it to others, and do not ask for it again. Without ``fetches`` nobody fetches.
    ``overtake``: a prompt may be overtaken by those that come up to so many times its own compute after it, within its
    objective (:func:`urgency.due`); 0: by age alone. ``thrift``: long prompts are let in only where they wait less
    (:func:`urgency.latest`).
    ``index_delay``, ``control_delay``: until the index knows of a change, and from arrival to prefill beside queueing.
    ``handover``: from first token and last KV until the sequence may join a batch. ``report_every``: between two load
    reports of an instance. ``ttft_slo``, ``tbt_slo``: what is not expected to meet them is refused.
    ``patience``: how long a request without room asks again before it is refused.
    """

    hardware: Hardware = Hardware()
    prefill: Annotated[int, Meta(ge=1)] = 8
    decode: Annotated[int, Meta(ge=1)] = 8
    group: Annotated[int, Meta(ge=1)] = 1
    chunk: Annotated[int, Meta(ge=512)] = 8192
    conductors: Annotated[int, Meta(ge=1)] = 1
    policy: str = "global_cache"
    threshold: Annotated[float, Meta(ge=1)] = 1.0
    fetches: bool = True
    decode_cache: bool = True
    optimistic: bool = True
    overtake: Annotated[float, Meta(ge=0)] = 0.0
    thrift: Annotated[float, Meta(ge=0)] = 0.0
    index_delay: Annotated[float, Meta(ge=0)] = 0.005
    control_delay: Annotated[float, Meta(ge=0)] = 0.001
    handover: Annotated[float, Meta(ge=0)] = 0.0
    report_every: Annotated[float, Meta(gt=0)] = 1.0
    expected_output: Annotated[int, Meta(ge=1)] = 256
    max_batch: Annotated[int, Meta(ge=1)] = 256
    ttft_slo: Annotated[float, Meta(gt=0)] = math.inf
    tbt_slo: Annotated[float, Meta(gt=0)] = math.inf
    patience: Annotated[float, Meta(ge=0)] = 30.0
    failures: tuple[Failure, ...] = ()
    seed: int = 0

    @property
    def due(self) -> float:
        """The objective that queues are ordered by; the paper's where nobody is refused."""
        return TTFT_SLO if math.isinf(self.ttft_slo) else self.ttft_slo


class CoupledSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Instances that prefill and decode on the same node, after vLLM 0.5: a waiting prompt stops the batch, or, where
    ``chunked``, is cut into pieces of ``budget`` tokens a step. ``prefix_cache``: in HBM, of each instance alone."""

    hardware: Hardware = Hardware()
    nodes: Annotated[int, Meta(ge=1)] = 16
    prefix_cache: bool = False
    chunked: bool = False
    budget: Annotated[int, Meta(ge=1)] = 512
    most_prefill: Annotated[int, Meta(ge=1)] = 131_072
    max_batch: Annotated[int, Meta(ge=1)] = 256
    router: Literal["round_robin", "least_loaded"] = "least_loaded"
    seed: int = 0
