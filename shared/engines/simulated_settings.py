"""Settings of the simulated engine, which prefill and decode instances have beside their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from shared.config import CommonSettings

if TYPE_CHECKING:
    from shared.engines.simulated import Simulation

FAST = "0: as fast as possible."


class SimulatedSettings(CommonSettings, frozen=True, kw_only=True):
    """The defaults are about those of an 8-billion-parameter model on one large GPU, but for the KV, which is small."""

    context_length: Annotated[
        int,
        Meta(
            description="Tokens of prompt and answer together with the engine `simulated`; 0: the model's own.",
            ge=0,
            le=1 << 24,
        ),
    ] = 0
    simulated_prefill_base_s: Annotated[float, Meta(description=f"Seconds of any prefill. {FAST}", ge=0, le=60)] = 0.01
    simulated_prefill_token_s: Annotated[
        float, Meta(description=f"Seconds of prefill for each token that is not cached. {FAST}", ge=0, le=1)
    ] = 1e-4
    simulated_prefill_square_s: Annotated[
        float, Meta(description="Seconds of prefill for n² - p², of n tokens of which p are cached.", ge=0, le=1)
    ] = 5e-10
    simulated_decode_base_s: Annotated[float, Meta(description=f"Seconds of any decode step. {FAST}", ge=0, le=60)] = (
        0.012
    )
    simulated_decode_sequence_s: Annotated[
        float, Meta(description="Seconds of a decode step for each sequence in the batch.", ge=0, le=1)
    ] = 5e-5
    simulated_decode_token_s: Annotated[
        float, Meta(description="Seconds of a decode step for each token attended to.", ge=0, le=1)
    ] = 2e-8
    simulated_layers: Annotated[int, Meta(description="Layers of simulated KV; 0: the model's.", ge=0, le=1024)] = 1
    simulated_kv_heads: Annotated[int, Meta(description="KV heads of simulated KV; 0: the model's.", ge=0, le=1024)] = 1
    simulated_head_dim: Annotated[
        int, Meta(description="Size of a head of simulated KV; 0: the model's.", ge=0, le=4096)
    ] = 2

    @property
    def described(self) -> Simulation:
        """What these settings describe."""
        from shared.engines.simulated import Simulation
        from shared.latency import DecodeModel, PrefillModel

        return Simulation(
            PrefillModel(
                self.simulated_prefill_base_s, self.simulated_prefill_token_s, self.simulated_prefill_square_s
            ),
            DecodeModel(self.simulated_decode_base_s, self.simulated_decode_sequence_s, self.simulated_decode_token_s),
            self.simulated_layers,
            self.simulated_kv_heads,
            self.simulated_head_dim,
            self.context_length,
        )
