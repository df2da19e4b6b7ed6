"""D1 through the whole mesh: the same tokens under another salt share nothing; under the same, they do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.mesh.mesh import Mesh

pytestmark = [pytest.mark.mesh]
B = 32


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text("tenants:\n  a: {keys: [sk-tenant-a1, sk-tenant-a2]}\n  b: {keys: [sk-tenant-b]}\n")
    path.chmod(0o600)
    return path


async def test_d1_tenants_never_share_blocks(
    up: Callable[..., Mesh], tokens: Callable[[int], list[int]], keys: Path
) -> None:
    mesh = up("--engine", "simulated", "--api-keys", str(keys))
    prompt = tokens(4 * B + 1)
    assert (await mesh.ask(prompt)).status == 401
    assert (await mesh.ask(prompt, key="sk-tenant-c")).status == 401
    mesh.key, texts = "sk-tenant-a1", set[str]()
    for key, cached in (("sk-tenant-a1", 0), ("sk-tenant-b", 0), ("sk-tenant-a2", 4 * B), ("sk-tenant-b", 4 * B)):
        answer = await mesh.ask(prompt, key=key)
        assert (answer.status, answer.cached) == (200, cached), key
        texts.add(answer.text)
        await mesh.indexed()
    assert len(texts) == 1
    assert mesh.total("mooncake_simulated_kv_mismatches_total") == 0
