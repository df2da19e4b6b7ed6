"""The mesh that all clients are pointed at, and a world in which there is nothing else."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.clients.live import KEY, live_mesh
from tests.mesh.mesh import MODEL, Mesh

# Read when these libraries are imported: what they would fetch comes with them.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["LANGSMITH_TRACING"] = os.environ["LANGCHAIN_TRACING_V2"] = "false"

LIVE = pytest.StashKey[contextlib.ExitStack]()
"""What ends the mesh."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded random Llama. The folder's name is the served model's."""
    from shared.engines.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(scope="session")
def mesh(model: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Mesh]:
    with contextlib.ExitStack() as stack:
        pytestconfig.stash[LIVE] = stack
        yield stack.enter_context(live_mesh(model, tmp_path_factory.mktemp("clients")))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After the last of these tests, not at the end of the session: an idle mesh takes a twelfth of a core."""
    if nextitem is None or not nextitem.nodeid.startswith("tests/clients/"):
        item.config.stash.get(LIVE, contextlib.ExitStack()).close()


@pytest.fixture(scope="session")
def client(mesh: Mesh) -> Iterator[OpenAI]:
    """It refuses every answer that is not exactly of the types that it declares."""
    with OpenAI(
        base_url=mesh.url + "/v1", api_key=KEY, max_retries=0, timeout=200, _strict_response_validation=True
    ) as one:
        yield one


@pytest.fixture(scope="session")
def usual(mesh: Mesh) -> Iterator[OpenAI]:
    """For streamed completions: their chunks have `finish_reason: null`, as OpenAI's have, and other than the type
    that this client declares."""
    with OpenAI(base_url=mesh.url + "/v1", api_key=KEY, max_retries=0, timeout=200) as one:
        yield one


@pytest.fixture(autouse=True)
def _own_keys_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients read keys, addresses and proxies from the environment: there is nothing but what a test gives them."""
    for name in list(os.environ):
        if name.startswith("OPENAI_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _nobody_asks_the_internet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    asked: list[str] = []
    resolve = socket.getaddrinfo

    def own_machine_only(host: Any, *rest: Any, **options: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name not in (None, "127.0.0.1", "::1", "localhost"):
            asked.append(name)
            raise socket.gaierror(socket.EAI_NONAME, f"a test asked for {name}")
        return resolve(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", own_machine_only)
    yield
    assert asked == []
