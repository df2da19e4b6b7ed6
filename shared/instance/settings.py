"""Settings that prefill and decode instances share."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from shared.config import SECRET
from shared.engines.simulated_settings import SimulatedSettings

if TYPE_CHECKING:
    from shared.engines.simulated import Simulation


class InstanceSettings(SimulatedSettings, frozen=True, kw_only=True):
    """One engine beside one store agent."""

    id: Annotated[str, Meta(description="Identity of the instance; empty: a random UUID.", max_length=64)] = ""
    node: Annotated[str, Meta(description="Name of the node, for people.", max_length=64)] = "node"
    agent: Annotated[
        str, Meta(description="Unix socket of the node's store agent; a leading @ means the abstract namespace.")
    ] = "@mooncake-store"
    secret: Annotated[
        str, Meta(description="Shared secret of all agents and engines of the mesh.", extra=SECRET, max_length=1024)
    ] = ""
    engine: Annotated[
        Literal["transformers", "simulated"],
        Meta(description="What computes; `simulated` takes the time of a model and answers with words."),
    ] = "transformers"
    model: Annotated[str, Meta(description="Model folder or hub id; empty: the default model.")] = ""
    served_name: Annotated[str, Meta(description="Name under which clients ask for it; empty: the model's own.")] = ""
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "fp32", "bf16", "fp16"],
        Meta(description="Type of weights and KV."),
    ] = "float32"
    block_size: Annotated[int, Meta(description="Tokens per KV block.", ge=16, le=512)] = 32
    threads: Annotated[int, Meta(description="Threads that compute.", ge=1, le=1024)] = 1
    device: Annotated[str, Meta(description="Device of the engine.")] = "cpu"
    calibrate_s: Annotated[
        float, Meta(description="Seconds to measure the engine at the start, for the latency models.", ge=0, le=600)
    ] = 2.0
    latency_model: Annotated[
        str,
        Meta(
            description="File of `mooncake calibrate` with the engine's latency models; empty: measured at the start. "
            "The engine `simulated` takes the time that it says, whatever engine it was measured of."
        ),
    ] = ""
    silence_s: Annotated[
        float, Meta(description="Attempts of a conductor that is silent for longer are dropped.", ge=0.5, le=60)
    ] = 3.0
    heartbeat_s: Annotated[float, Meta(description="Seconds between heartbeats.", gt=0, le=5)] = 1.0
    agent_timeout_s: Annotated[
        float, Meta(description="How long the node's agent is waited for at the start.", gt=0, le=3600)
    ] = 60.0
    pool_timeout_s: Annotated[
        float, Meta(description="How long room in the pool is waited for before an attempt is given up.", gt=0, le=60)
    ] = 5.0
    fetch_timeout_s: Annotated[
        float, Meta(description="How long cached blocks are fetched before they are computed.", gt=0, le=600)
    ] = 10.0
    peer_timeout_s: Annotated[
        float,
        Meta(description="How long the other instance may leave a question unanswered before it is left.", gt=0, le=60),
    ] = 10.0

    @property
    def simulation(self) -> Simulation:
        """What these settings describe. Raises ConfigError for a file that is no calibration."""
        from shared.calibration import read_calibration

        described = self.described
        if not self.latency_model:
            return described
        kept = read_calibration(self.latency_model)
        return replace(described, prefill=kept.prefill, decode=kept.decode)
