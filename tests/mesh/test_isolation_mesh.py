"""D1 through the whole mesh: the same tokens under another salt share nothing; under the same, they do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.mesh.conftest import Alone, Mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(120)]
B = 32


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text("tenants:\n  a: {keys: [sk-tenant-a1, sk-tenant-a2]}\n  b: {keys: [sk-tenant-b]}\n")
    path.chmod(0o600)
    return path


async def test_d1_tenants_never_share_blocks(
    up: Callable[..., Mesh], alone: Alone, tokens: Callable[[int], list[int]], keys: Path
) -> None:
    mesh = up("--api-keys", str(keys))
    try:
        prompt = tokens(4 * B + 1)
        expected = alone(prompt)
        assert (await mesh.ask(prompt)).status == 401
        assert (await mesh.ask(prompt, key="sk-tenant-c")).status == 401
        for key, cached in (("sk-tenant-a1", 0), ("sk-tenant-b", 0), ("sk-tenant-a2", 4 * B), ("sk-tenant-b", 4 * B)):
            answer = await mesh.ask(prompt, key=key)
            assert (answer.text, answer.cached) == (expected, cached), key
            await asyncio.sleep(0.2)
    finally:
        assert mesh.stop() == 0
