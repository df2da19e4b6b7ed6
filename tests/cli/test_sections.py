"""One file for the whole mesh: what it says to a service is what the service does, unless ``up`` was told otherwise."""

from __future__ import annotations

import typing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.child import Spec
from cli.config_docs import settings_type
from cli.plan import Plan
from cli.sections import ALIASES, COMMON, SERVICES, read, told
from cli.settings import UpSettings
from shared.config import load
from shared.errors import ConfigError
from shared.setting import Setting, bare_type, settings_of
from tests.cli.test_up_plan import WIRING, understood

OURS = {setting.name for setting in settings_of(UpSettings)}
OTHER = {"host": "127.0.0.2", "metrics_host": "127.0.0.2", "ssd_path": "/ssd", "transports": "require:tcp"}


def other(setting: Setting) -> Any:
    """A value that is neither the service's default nor what ``up`` would give."""
    if setting.name in OTHER:
        return OTHER[setting.name]
    bare = bare_type(setting.annotation)
    if bare is str:
        return f"/{setting.name}"
    if typing.get_origin(bare) is typing.Literal:
        return [choice for choice in typing.get_args(bare) if choice != setting.default][-1]
    return 64 << 20 if setting.name.endswith("_bytes") else 77


def both(service: str) -> dict[str, Any]:
    """Everything that ``up`` and this service have: the places where one could hide the other's value."""
    settings = settings_of(settings_type(service))
    named = [s for s in settings if ALIASES.get(s.name, s.name) in OURS - COMMON]
    return {s.name: other(s) for s in named if not (service == "store" and s.name in ("host", "port"))}


def plan(file: Path, sections: dict[str, Any], *argv: str) -> Plan:
    file.write_text(yaml.safe_dump(sections))
    words = ("--config", str(file), *argv)
    settings, said = read(str(file), load(UpSettings, words, {}, "up"), told(words, {}))
    return Plan(settings, replace(WIRING, config=str(file), sections=said, port=settings.port), {})


def specs(made: Plan, service: str) -> list[Spec]:
    return [s for s in (*made.stores(), *made.engines(), made.conductor()) if f"services.{service}" in s.argv]


@pytest.mark.parametrize("service", SERVICES)
def test_a_section_of_the_file_is_heard(service: str, tmp_path: Path) -> None:
    section = both(service)
    for spec in specs(plan(tmp_path / "mesh.yaml", {service: section}), service):
        heard = understood(spec)
        wanted = section | ({"ssd_path": f"/ssd/{heard.node}"} if service == "store" else {})
        assert {name: getattr(heard, name) for name in wanted} == wanted


def test_flags_of_up_come_before_the_file(tmp_path: Path) -> None:
    made = plan(
        tmp_path / "mesh.yaml",
        {"store": {"pool_bytes": "2GiB"}, "conductor": {"port": 9}},
        "--pool-bytes",
        "64MiB",
        "--port",
        "7",
    )
    assert {understood(spec).pool_bytes for spec in made.stores()} == {64 << 20}
    assert understood(made.conductor()).port == 7


def test_without_a_section_up_decides(tmp_path: Path) -> None:
    made = plan(tmp_path / "mesh.yaml", {"up": {"pool_bytes": "32MiB"}, "decode": {"threads": 3}})
    assert {understood(spec).pool_bytes for spec in made.stores()} == {32 << 20}
    assert [understood(spec).threads for spec in made.engines()] == [1, 3]
    assert understood(made.conductor()).slo_ttft_ms == UpSettings().slo_ttft_ms


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"store": {"pool_byte": 1}}, "store.pool_byte (did you mean pool_bytes?) (read for store)"),
        ({"decode": {"threads": 0}}, "decode.threads: 0 is refused"),
        ({"port": 9000}, "unknown key port"),
        ({"conductor": 5}, "section conductor must hold keys and values"),
    ],
)
def test_what_a_service_would_refuse_is_refused_before_it_starts(
    sections: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(tmp_path / "mesh.yaml", sections)
    assert words in refused.value.message and "mesh.yaml" in refused.value.message
