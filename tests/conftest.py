"""What all tests share: quiet threads, and no setting of the developer's own environment."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

KEPT = {"MOONCAKE_CACHE"}


@pytest.fixture(autouse=True)
def _own_settings_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests mean the defaults: ``MOONCAKE_*`` and exporters of the caller's shell do not reach them."""
    for name in list(os.environ):
        if (name.startswith("MOONCAKE_") and name not in KEPT) or name.startswith("OTEL_"):
            monkeypatch.delenv(name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole meshes first: they take longest, so the workers of a parallel run end together."""
    items.sort(key=lambda item: item.get_closest_marker("mesh") is None)
