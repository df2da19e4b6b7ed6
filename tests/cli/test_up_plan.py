"""What ``mooncake up`` starts: every flag is a setting of the service that gets it, and nothing secret is in sight."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from cli.child import Spec
from cli.config_docs import settings_type
from cli.plan import CONDUCTOR, ENGINES, GRACE, SERVERS, STORES, Plan, Wiring
from cli.settings import Policy, UpSettings
from services.conductor.dispatch.settings import PolicyName
from services.conductor.scheduling import POLICIES
from shared.config import load
from shared.errors import ConfigError

WIRING = Wiring(
    mark="abcd",
    secret="very-secret",
    nats="nats://127.0.0.1:5001",
    redis="redis://127.0.0.1:5002/0",
    folder="/models/tiny",
    served="tiny",
    port=18000,
)


def plan(env: dict[str, str] | None = None, **settings: Any) -> Plan:
    return Plan(UpSettings(**settings), WIRING, env or {})


def everything(made: Plan) -> list[Spec]:
    return [*made.servers(), *made.stores(), *made.engines(), made.conductor()]


def understood(spec: Spec) -> Any:
    """The settings that the service makes of its command line and environment."""
    service = spec.argv[spec.argv.index("-m") + 1].removeprefix("services.")
    flags = spec.argv[spec.argv.index("-m") + 2 :]
    return load(settings_type(service), flags, spec.env)


def test_a_node_has_an_engine_and_an_agent_on_one_socket() -> None:
    made = plan(prefill=2, decode=2)
    assert [spec.name for spec in made.stores()] == ["store-p0", "store-p1", "store-d0", "store-d1"]
    assert [spec.name for spec in made.engines()] == ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    sockets = [understood(spec).socket for spec in made.stores()]
    assert sockets == [understood(spec).agent for spec in made.engines()]
    assert len(set(sockets)) == 4 and all(name.startswith("@mooncake-abcd-") for name in sockets)


def test_several_conductors_share_the_port() -> None:
    one, *more = plan(conductors=1).conductors()
    assert not more and one.name == "conductor" and not understood(one).reuse_port
    two = plan(conductors=2).conductors()
    assert [spec.name for spec in two] == ["conductor-0", "conductor-1"]
    assert all((understood(spec).port, understood(spec).reuse_port) == (18000, True) for spec in two)
    assert len({understood(spec).id for spec in two}) == 2
    assert "2 conductors" in plan(conductors=2).summary()


def test_services_understand_what_they_are_given() -> None:
    made = plan(
        mesh="lab",
        dtype="bfloat16",
        block_size=64,
        threads=2,
        pool_bytes=1 << 26,
        transport="tcp",
        verify="off",
        policy="least_loaded",
        slo_ttft_ms=900,
        host="::1",
        api_keys="/keys.yaml",
    )
    store, engine, conductor = next(made.stores()), next(made.engines()), made.conductor()
    for spec in (store, engine, conductor):
        settings = understood(spec)
        assert (settings.mesh, settings.nats, settings.redis) == ("lab", WIRING.nats, WIRING.redis)
    assert understood(store).pool_bytes == 1 << 26
    assert (understood(store).transports, understood(store).verify) == ("require:tcp", "off")
    assert (understood(engine).model, understood(engine).dtype) == ("/models/tiny", "bfloat16")
    assert (understood(engine).block_size, understood(engine).threads) == (64, 2)
    assert understood(engine).served_name == understood(conductor).served_model_name == "tiny"
    assert (understood(conductor).host, understood(conductor).port) == ("::1", 18000)
    assert (understood(conductor).policy, understood(conductor).slo_ttft_ms) == ("least_loaded", 900)
    assert understood(conductor).api_keys == "/keys.yaml"


def test_the_secret_reaches_agents_and_engines_and_no_command_line() -> None:
    made = plan()
    assert all(understood(spec).secret == "very-secret" for spec in (*made.stores(), *made.engines()))
    assert not [word for spec in everything(made) for word in spec.argv if "very-secret" in word]
    assert "very-secret" not in made.conductor().env.values()


def test_passwords_in_addresses_reach_services_and_no_command_line() -> None:
    wiring = replace(WIRING, nats="nats://me:pass-n@there:4222", redis="redis://:pass-r@there:6379/0")
    specs = everything(Plan(UpSettings(nats=wiring.nats, redis=wiring.redis), wiring, {}))
    assert all((understood(spec).nats, understood(spec).redis) == (wiring.nats, wiring.redis) for spec in specs)
    assert not [word for spec in specs for word in spec.argv if "pass-" in word]


def test_every_process_carries_the_mark() -> None:
    assert all(spec.env["MOONCAKE_MESH_ID"] == "abcd" for spec in everything(plan()))


def test_stages_and_graces_fit_the_ten_seconds() -> None:
    made = plan()
    assert [s.stage for s in everything(made)] == [SERVERS, SERVERS, STORES, STORES, ENGINES, ENGINES, CONDUCTOR]
    assert sum(GRACE.values()) < 10


@pytest.mark.parametrize(
    ("nats", "redis", "started"),
    [
        ("", "", ["nats", "redis"]),
        ("nats://there:4222", "", ["redis"]),
        ("", "redis://there:6379", ["nats"]),
        ("nats://there:4222", "redis://there:6379", []),
    ],
)
def test_servers_are_started_unless_given(nats: str, redis: str, started: list[str]) -> None:
    assert [spec.name for spec in plan(nats=nats, redis=redis).servers()] == started


def test_variables_for_up_do_not_reach_services_and_theirs_do() -> None:
    """``MOONCAKE_PORT`` is the port of the API for ``up``; for a store agent it would be that of its data plane."""
    env = {
        "MOONCAKE_PORT": "9000",
        "MOONCAKE_LEASE_TTL": "2.5",
        "MOONCAKE_MAX_BATCH": "7",
        "MOONCAKE_CACHE": "/cache",
        "MOONCAKE_NONSENSE": "1",
        "PATH": "/bin",
    }
    made = plan(env)
    store, decode = next(made.stores()).env, list(made.engines())[1].env
    assert "MOONCAKE_PORT" not in store and "MOONCAKE_NONSENSE" not in store
    assert store["MOONCAKE_LEASE_TTL"] == "2.5" and "MOONCAKE_LEASE_TTL" not in decode
    assert decode["MOONCAKE_MAX_BATCH"] == "7" and "MOONCAKE_MAX_BATCH" not in store
    assert store["MOONCAKE_CACHE"] == "/cache" and store["PATH"] == "/bin"


def test_the_file_of_settings_reaches_every_service_wherever_it_runs(tmp_path: Path) -> None:
    file = tmp_path / "mesh.yaml"
    file.write_text("store: {lease_ttl: 2.5}\ndecode: {max_batch: 7}\n")
    made = Plan(UpSettings(), replace(WIRING, config=str(file)), {})
    assert understood(next(made.stores())).lease_ttl == 2.5
    assert understood(list(made.engines())[1]).max_batch == 7
    assert "MOONCAKE_CONFIG" not in made.servers()[0].env


@pytest.mark.parametrize(("first", "ports"), [(-1, [-1] * 5), (0, [0] * 5), (9100, [9100, 9101, 9102, 9103, 9104])])
def test_metrics_ports_count_up_from_the_first(first: int, ports: list[int]) -> None:
    made = plan(metrics_port=first)
    specs = [*made.stores(), *made.engines(), made.conductor()]
    assert [understood(spec).metrics_port for spec in specs] == ports


def test_a_working_folder_with_packages_of_the_same_name_is_not_looked_at() -> None:
    assert all("-P" in spec.argv for spec in everything(plan()) if "-m" in spec.argv)


def test_up_offers_every_policy_of_the_conductor() -> None:
    assert set(get_args(Policy)) == set(get_args(PolicyName)) == set(POLICIES)


def test_each_node_has_an_ssd_tier_of_its_own(tmp_path: Path) -> None:
    assert {understood(spec).ssd_path for spec in plan().stores()} == {""}
    stores = [understood(spec) for spec in plan(ssd_path=str(tmp_path), ssd_bytes=1 << 26).stores()]
    assert [s.ssd_path for s in stores] == [str(tmp_path / s.node) for s in stores]
    assert {s.ssd_bytes for s in stores} == {1 << 26}


def test_the_certificate_reaches_every_store_and_nobody_else() -> None:
    files = {"data_tls_cert": "/c", "data_tls_key": "/k", "data_tls_ca": "/a"}
    made = Plan(UpSettings(), replace(WIRING, tls=files), {})
    stores = [understood(spec) for spec in made.stores()]
    assert [(s.data_tls_cert, s.data_tls_key, s.data_tls_ca) for s in stores] == [("/c", "/k", "/a")] * 2
    others = [*made.servers(), *made.engines(), made.conductor()]
    assert not [word for spec in others for word in (*spec.argv, *spec.env) if "tls" in word.lower()]
    assert {understood(spec).data_tls_cert for spec in plan().stores()} == {""}


def test_files_of_one_s_own_come_together() -> None:
    env = {"MOONCAKE_DATA_TLS_CERT": "c", "MOONCAKE_DATA_TLS_KEY": "k", "MOONCAKE_DATA_TLS_CA": "a"}
    assert list(load(UpSettings, [], env).tls_files.values()) == ["c", "k", "a"]
    for missing in env:
        with pytest.raises(ConfigError, match="must be set together"):
            load(UpSettings, [], {name: value for name, value in env.items() if name != missing})
