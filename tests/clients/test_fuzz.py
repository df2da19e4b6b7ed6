"""Schemathesis, for seconds and with a fixed seed; ``make fuzz`` runs it for ten minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.fuzz import fuzz, incarnations, unharmed
from tests.mesh.mesh import Mesh

pytestmark = [pytest.mark.mesh, pytest.mark.slow]


async def test_no_server_error_and_nothing_but_what_is_described(mesh: Mesh, tmp_path: Path) -> None:
    before = incarnations(mesh)
    done = fuzz(mesh, tmp_path, "--seed=1", "--max-examples=8", patience=240)
    assert done.returncode == 0, done.stdout + done.stderr
    await unharmed(mesh, before)
