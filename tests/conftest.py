"""What all tests share: quiet threads, no setting of the developer's own environment, how much is drawn, who begins,
and that neither process nor file outlives the run that started it."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from tests.guarded import guard
from tests.units import rank, unit_of

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

KEPT = {"MOONCAKE_CACHE"}

# A timing is never a test. tests/examples.py scales the numbers that tests give.
settings.register_profile("usual", deadline=None, max_examples=30)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile("usual")

asyncio.set_event_loop(None)  # else pytest-asyncio makes one that nobody closes


def pytest_configure(config: pytest.Config) -> None:
    config.add_cleanup(guard())


@pytest.fixture(autouse=True)
def _own_settings_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests mean the defaults: ``MOONCAKE_*`` and exporters of the caller's shell do not reach them."""
    for name in list(os.environ):
        if (name.startswith("MOONCAKE_") and name not in KEPT) or name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process that is killed leaves its temporary folders behind: here, in one that goes with the session."""
    folder = tmp_path_factory.mktemp("tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield
    shutil.rmtree(folder, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: rank(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are cores: about half of the time, a test waits for a process to come up or to notice."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For ``make test``: a unit to a worker, by :func:`rank`. Who asks for another distribution gets it."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = unit_of
    return scheduler
