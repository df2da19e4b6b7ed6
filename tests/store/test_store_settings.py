"""Settings that an agent does not start with."""

from __future__ import annotations

import pytest

from services.store.settings import StoreSettings
from shared.config import load
from shared.errors import ConfigError


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "node-a"])
def test_a_data_plane_that_others_reach_needs_a_secret(host: str) -> None:
    with pytest.raises(ConfigError, match="secret must be set"):
        load(StoreSettings, ["--host", host], {})
    assert load(StoreSettings, ["--host", host], {"MOONCAKE_SECRET": "s"}).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_on_loopback_it_does_not(host: str) -> None:
    assert load(StoreSettings, ["--host", host], {}).secret == ""


def test_watermarks_are_in_order() -> None:
    with pytest.raises(ConfigError, match="high_watermark"):
        load(StoreSettings, ["--low-watermark", "0.3", "--high-watermark", "0.2"], {})
