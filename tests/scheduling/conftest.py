"""Views of any shape."""

from __future__ import annotations

import pytest

from tests.scheduling.cluster import Views


@pytest.fixture
def views() -> Views:
    return Views()
