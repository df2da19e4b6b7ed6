"""Containers of our images on their own: told to stop at any moment of their start."""

from __future__ import annotations

import time

import pytest

from shared.model import cache_root
from tests.compose.deployment import inspect, missing, run

NOWHERE = ["--nats", "nats://127.0.0.1:9", "--redis", "redis://127.0.0.1:9/0"]
IMAGES = {
    "conductor": "mooncake-mesh",
    "store": "mooncake-mesh",
    "prefill": "mooncake-engine",
    "decode": "mooncake-engine",
}

pytestmark = [pytest.mark.rig, pytest.mark.timeout(600), pytest.mark.skipif(bool(missing()), reason=missing() or "-")]


@pytest.mark.parametrize("after", [0.0, 0.1, 1.0, 3.0])
@pytest.mark.parametrize("service", IMAGES)
def test_it_ends_by_itself_whenever_it_is_told(service: str, after: float) -> None:
    """Docker asks once, and kills (137) ten seconds later. After a second or so an engine imports torch."""
    models = ["--volume", f"{cache_root()}:/models:ro"]
    container = run("docker", "create", *models, IMAGES[service], f"services.{service}", *NOWHERE).strip()
    try:
        run("docker", "start", container)
        time.sleep(after)
        run("docker", "stop", "--time", "10", container)
        assert int(inspect(container, "{{.State.ExitCode}}")) in (0, 143)
    finally:
        run("docker", "rm", "--force", container)
