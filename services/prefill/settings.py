"""Settings of a prefill instance."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shared.instance.settings import InstanceSettings


class PrefillSettings(InstanceSettings, frozen=True, kw_only=True):
    """What ``python -m services.prefill`` takes."""

    prefill_chunk: Annotated[
        int, Meta(description="Tokens computed in one step; a cancelled prompt stops within one.", ge=16, le=65536)
    ] = 256
    fetches: Annotated[int, Meta(description="Prompts whose prefix is fetched at the same time.", ge=1, le=256)] = 4
    stream_timeout_s: Annotated[
        float, Meta(description="Deadline of one stream call to decode's node.", gt=0, le=600)
    ] = 30.0
