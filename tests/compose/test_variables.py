"""What of the caller's environment reaches the services of docker-compose.yml. Asks compose, and needs no Docker."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from opentelemetry.sdk import environment_variables

from tests.compose.deployment import COMPOSE, NODES, run

pytestmark = [pytest.mark.rig, pytest.mark.skipif(not COMPOSE, reason="no compose: make test-compose")]

NOT_OURS = ("METRIC", "LOGS", "BLRP", "LOGRECORD", "ZIPKIN", "PYTHON", "PROMETHEUS", "CONFIG_FILE")
"""Parts of names that concern other signals than traces, or the SDK's own experiments."""

STANDARD = [
    name
    for name in (*vars(environment_variables).values(), "OTEL_TRACES_EXPORTER", "OTEL_PROPAGATORS")
    if isinstance(name, str) and name.startswith("OTEL_") and not any(part in name for part in NOT_OURS)
]


def environments(**chosen: str) -> dict[str, dict[str, Any]]:
    env = {name: value for name, value in os.environ.items() if name != "COMPOSE_PROFILES"}
    config = json.loads(run(*COMPOSE, "--profile", "*", "config", "--format", "json", env=env | chosen))
    return {name: config["services"][name]["environment"] for name in NODES}


def test_every_standard_variable_of_traces_reaches_every_service() -> None:
    assert len(STANDARD) > 30
    chosen = {name: f"value of {name}" for name in STANDARD}
    for service, environment in environments(**chosen).items():
        assert {name: environment.get(name) for name in STANDARD} == chosen, service


def test_what_is_not_set_is_not_there_either() -> None:
    """An empty sampler is not the default sampler."""
    for environment in environments().values():
        given = {name: value for name, value in environment.items() if name.startswith("OTEL_") and value is not None}
        assert given == {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}


def test_with_the_profile_spans_go_to_jaeger_unless_they_go_elsewhere() -> None:
    name = "OTEL_EXPORTER_OTLP_ENDPOINT"
    for environment in environments(COMPOSE_PROFILES="observability").values():
        assert environment[name] == "http://jaeger:4318"
    for environment in environments(COMPOSE_PROFILES="observability", **{name: "http://elsewhere:4317"}).values():
        assert environment[name] == "http://elsewhere:4317"


def test_the_conductor_needs_no_image_of_engines() -> None:
    services = json.loads(run(*COMPOSE, "config", "--format", "json"))["services"]
    needed = {"conductor"}
    while more := {one for name in needed for one in services[name].get("depends_on", {})} - needed:
        needed |= more
    assert "mooncake-engine" not in {services[name]["image"] for name in needed}
