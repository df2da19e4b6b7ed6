"""Settings of a decode instance."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shared.instance.settings import InstanceSettings


class DecodeSettings(InstanceSettings, frozen=True, kw_only=True):
    """What ``python -m services.decode`` takes."""

    max_batch: Annotated[int, Meta(description="Sequences decoded in one step.", ge=1, le=4096)] = 32
    expected_output: Annotated[
        int, Meta(description="Output tokens that room is kept for where a request does not say.", ge=1, le=1 << 20)
    ] = 256
    headroom: Annotated[
        float, Meta(description="Part of the pool kept free of promises, for growth beyond them.", ge=0, lt=1)
    ] = 0.05
    landing_timeout_s: Annotated[
        float,
        Meta(
            description="How long nothing more of a prompt may arrive, or its first token may be missing, before the "
            "attempt is given up. Prompts that are computed before it count.",
            gt=0,
            le=86400,
        ),
    ] = 600.0
    growth_timeout_s: Annotated[
        float, Meta(description="How long a step waits for room before the youngest gives way.", ge=0, le=5)
    ] = 0.05
