"""Fixtures of the gateway's tests; what they are made of lies in fakes.py."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import structlog
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.conductor.gateway import completer, exchange
from services.conductor.gateway.tokenizer import Tokenizer
from tests.gateway.fakes import Api, StartApi, running, write_tokenizer
from tests.spans import recorded


@pytest.fixture(autouse=True, scope="session")
def plain_tracebacks() -> Iterator[None]:
    """Those with colours and locals take seconds each."""
    renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[renderer])
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tiny-tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)


@pytest.fixture
async def api(tokenizer: Tokenizer) -> AsyncIterator[Api]:
    async with running(tokenizer) as one:
        yield one


@pytest.fixture
async def start(tokenizer: Tokenizer) -> AsyncIterator[StartApi]:
    """``await start(options=..., ...)``: a gateway of a test's own making, stopped at its end."""
    async with AsyncExitStack() as stack:

        async def begin(**more: Any) -> Api:
            return await stack.enter_async_context(running(tokenizer, **more))

        yield begin


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    with recorded(monkeypatch, exchange, completer) as exporter:
        yield exporter
