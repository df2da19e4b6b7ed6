"""API keys: who may ask, and that tenants never share a block."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from services.conductor.gateway.prompts import salted
from services.conductor.gateway.tenants import CHECK_PERIOD, Tenants
from shared.api_keys import Tenant, read_key_file
from shared.errors import ConfigError, Unauthorized
from tests.gateway.fakes import CHAT, NAMESPACE, Api, StartApi, assert_envelope

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789"
HASHED_BOB = "sha256:" + hashlib.sha256(BOB.encode()).hexdigest()
FILE = f"""
tenants:
  alice: {{keys: [{ALICE}], salt: pepper}}
  bob: {{keys: ["{HASHED_BOB}"]}}
"""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "keys.yaml"
    file.write_text(FILE)
    return file


def rewrite(path: Path, text: str | None) -> None:
    """None removes the file."""
    if text is None:
        path.unlink()
    else:
        path.write_text(text)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def ask(api: Api, headers: dict[str, str]) -> tuple[int, Any, Any]:
    return await api.post("/v1/chat/completions", CHAT, headers=headers)


def test_without_a_file_everybody_is_the_nameless_tenant() -> None:
    assert Tenants(None, Clock()).identify("Bearer whatever") == Tenant("", "")


def test_keys_in_clear_and_hashed_name_their_tenant(path: Path) -> None:
    tenants = Tenants(path, Clock())
    assert tenants.identify(f"Bearer {ALICE}") == Tenant("alice", "pepper")
    assert tenants.identify(f"bearer  {BOB} ").name == "bob"
    assert tenants.identify(f"Bearer {BOB}").salt


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", f"Basic {ALICE}", ALICE, "Bearer sk-wrong", HASHED_BOB])
def test_anything_else_is_unauthorized(path: Path, header: str) -> None:
    with pytest.raises(Unauthorized) as error:
        Tenants(path, Clock()).identify(header)
    assert ALICE not in str(error.value)


async def test_every_endpoint_of_the_api_wants_a_key(start: StartApi, path: Path) -> None:
    api = await start(tenants=Tenants(path, Clock()))
    for headers in ({}, bearer("sk-wrong"), bearer("\udcff\udcfe")):
        status, answer, got = await ask(api, headers)
        assert status == 401
        error = assert_envelope(answer, got)
        assert error["code"] == "invalid_api_key"
        assert got["WWW-Authenticate"] == "Bearer"
        assert "sk-wrong" not in error["message"]
    for url in ("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize", "/v1/completions"):
        status, answer, got = await api.post(url, {"prompt": 5})
        assert (status, assert_envelope(answer, got)["code"]) == (401, "invalid_api_key")
    closed, open_ = ("/v1/models", "/v1/models/tiny", "/cluster", "/version"), ("/health", "/ready", "/metrics")
    for url, status in [*((url, 401) for url in closed), *((url, 200) for url in (*open_, "/openapi.json"))]:
        async with api.http.get(api.server.url + url) as response:
            assert response.status == status
        async with api.http.get(api.server.url + url, headers=bearer(ALICE)) as response:
            assert response.status == 200
    assert api.dispatcher.asked == []
    assert (await ask(api, bearer(ALICE)))[0] == 200
    async with api.http.get(api.server.url + "/openapi.json") as response:
        paths = (await response.json())["paths"]
    assert all(paths[url]["get"]["security"] == [{"key": []}] for url in ("/cluster", "/version", "/v1/models"))
    assert all(paths[url]["get"]["security"] == [] for url in open_)


async def test_tenants_have_roots_of_their_own(start: StartApi, path: Path) -> None:
    api = await start(tenants=Tenants(path, Clock()))
    long = CHAT | {"messages": [{"role": "user", "content": "fox " * 50}]}
    for key in (ALICE, BOB, ALICE):
        await api.post("/v1/chat/completions", long, headers=bearer(key))
    first, other, again = api.dispatcher.asked
    assert [g.tenant for g in api.dispatcher.asked] == ["alice", "bob", "alice"]
    assert first.root == again.root == salted(NAMESPACE, "pepper").root()
    assert first.keys == again.keys != b""
    keys = {first.keys[i : i + 16] for i in range(0, len(first.keys), 16)}
    assert not keys & {other.keys[i : i + 16] for i in range(0, len(other.keys), 16)}
    assert NAMESPACE.root() not in (first.root, other.root)


async def test_a_changed_file_is_read_again(start: StartApi, path: Path) -> None:
    clock = Clock()
    api = await start(tenants=Tenants(path, clock))
    rewrite(path, "tenants: {carol: {keys: [sk-carol-0123]}}")
    clock.now += CHECK_PERIOD + 0.1
    assert (await ask(api, bearer(ALICE)))[0] == 401
    assert (await ask(api, bearer("sk-carol-0123")))[0] == 200


async def test_a_broken_file_keeps_the_last_good_one_and_is_seen(start: StartApi, path: Path) -> None:
    clock = Clock()
    api = await start(tenants=Tenants(path, clock))
    for broken in ("tenants: [", None, "nonsense: 1"):
        rewrite(path, broken)
        clock.now += CHECK_PERIOD + 0.1
        assert (await ask(api, bearer(ALICE)))[0] == 200
        async with api.http.get(api.server.url + "/ready") as response:
            assert (await response.json())["degraded"] == ["api_keys_invalid"]
    rewrite(path, FILE)
    clock.now += CHECK_PERIOD + 0.1
    assert (await ask(api, bearer(ALICE)))[0] == 200
    assert api.gateway.readiness().degraded == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tenants: [",
        "tenants: 5",
        "tenants: {a: {keys: []}}",
        "tenants: {a: {keys: [short]}}",
        "tenants: {a: {keys: ['sha256:zz']}}",
        "tenants: {a: {keys: [sk-secret-012345], sallt: x}}",
        "tenants: {a: {keys: [sk-secret-012345]}, b: {keys: [sk-secret-012345]}}",
        "tenants: {a: {keys: [2020-13-45]}}",
        "tenants: {a: {keys: [0x_]}}",
        "tenants: {a: {keys: [" + "9" * 5000 + "]}}",
        "tenants: {a: {keys: [!!int '']}}",
        "tenants: {a: {keys: [!!timestamp secret]}}",
        "tenants: {a: {keys: [!!bool secret]}}",
        "tenants: " + "[" * 5000 + "]" * 5000,
        'tenants: {a: {keys: ["sk-secret-\\ud800"]}}',
        'tenants: {"\\ud800": {keys: [sk-secret-012345]}}',
        "tenants: &a {x: *a}",
        "tenants: !!python/object/apply:os.getpid []",
    ],
)
def test_a_bad_file_is_refused_without_showing_a_key(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_key_file(path)
    assert "secret" not in str(error.value)


async def test_values_that_yaml_chokes_on_do_not_harm_a_request(start: StartApi, path: Path) -> None:
    clock = Clock()
    api = await start(tenants=Tenants(path, clock))
    rewrite(path, "tenants: {a: {keys: [2020-13-45]}}")
    clock.now += CHECK_PERIOD + 0.1
    assert (await ask(api, bearer(ALICE)))[0] == 200
    assert api.gateway.readiness().degraded == ["api_keys_invalid"]


def test_a_pipe_in_place_of_the_file_is_refused_and_not_waited_for(path: Path) -> None:
    clock = Clock()
    tenants = Tenants(path, clock)
    path.unlink()
    os.mkfifo(path)
    clock.now += CHECK_PERIOD + 0.1
    assert tenants.identify(f"Bearer {ALICE}").name == "alice"
    assert "no file" in tenants.error


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keys\.yaml"):
        Tenants(tmp_path / "keys.yaml", Clock())
