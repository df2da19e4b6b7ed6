"""Logs, traces and metrics of one process.

Logs go to stderr: text on a terminal, JSON elsewhere, each line with what is bound (``request``, ``attempt``) and the
trace it belongs to. Spans are kept in memory for a while, and sent where an OTLP endpoint is set. Metrics live in one
registry, ``REGISTRY``.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast

import structlog
from opentelemetry import trace
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from shared.config import warn_of_ignored
from shared.errors import ConfigError

PREFIX = "mooncake_"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
QUIET = ("aiohttp.access", "asyncio", "httpx", "httpx2", "urllib3", "nats")
"""Libraries whose chatter starts at WARNING."""

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Buckets for durations in seconds."""

LAG_PERIOD = 0.25

REGISTRY = CollectorRegistry(auto_describe=True)

Event = MutableMapping[str, Any]


class TelemetrySettings(Protocol):
    """The part of the settings that is read here."""

    @property
    def log_level(self) -> str: ...

    @property
    def log_format(self) -> str: ...

    @property
    def trace_requests(self) -> int: ...


def setup(service: str, settings: TelemetrySettings) -> None:
    """Once, first thing in a process: log format and level; spans, if an endpoint is set or recent ones are kept.
    Variables of OpenTelemetry that cannot be met end the process with one line and exit code 2."""
    _setup_logs(service, settings.log_level, _console(settings.log_format))
    warn_of_ignored()
    sends = tracing_wanted(os.environ)
    if sends or (settings.trace_requests and not _disabled(os.environ)):
        from shared import tracing  # nobody else pays for the SDK

        try:
            tracing.start(service, settings.trace_requests, sends)
        except ConfigError as error:
            log(service).error("traces cannot be sent", error=error.message)
            sys.exit(2)


# -- logs --------------------------------------------------------------------------------------------------


def log(name: str) -> structlog.stdlib.BoundLogger:
    """A logger; ``log("store").info("evicted", blocks=3)``."""
    return cast(structlog.stdlib.BoundLogger, structlog.get_logger(name))


bound = structlog.contextvars.bound_contextvars
"""``with bound(request=id):`` every line logged inside, in this task and those it starts, carries the pair."""


def _console(log_format: str) -> bool:
    return log_format == "console" or (log_format == "auto" and sys.stderr.isatty())


def _colours() -> bool:
    return "NO_COLOR" not in os.environ and ("FORCE_COLOR" in os.environ or sys.stderr.isatty())


def _console_renderer() -> structlog.dev.ConsoleRenderer:
    """Plain tracebacks: the rich ones print local variables, and those hold secrets."""
    plain = structlog.dev.plain_traceback
    return structlog.dev.ConsoleRenderer(colors=_colours(), pad_event_to=0, pad_level=False, exception_formatter=plain)


structlog.configure(  # until `setup`, and in programs that never call it: as harmless, and never on stdout
    processors=[
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False),
        _console_renderer(),
    ],
    logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
)


def _trace_ids(_logger: object, _method: str, event: Event) -> Event:
    """Adds the ids of the current span, so that a log line finds its trace."""
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace"] = format(context.trace_id, "032x")
        event["span"] = format(context.span_id, "016x")
    return event


def _setup_logs(service: str, level: str, console: bool) -> None:
    def named(_logger: object, _method: str, event: Event) -> Event:
        event.setdefault("service", service)
        return event

    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="%H:%M:%S.%f" if console else "iso", utc=not console),
        *([] if console else [named]),
        _trace_ids,
    ]
    last: list[Any] = (
        [_console_renderer()]
        if console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    )
    handler = logging.StreamHandler(sys.stderr)
    strip = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[strip, *last]))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_a_thread
    for name in QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def _uncaught_in_a_thread(found: threading.ExceptHookArgs) -> None:
    if found.exc_type is not SystemExit:  # a thread may end itself so
        _uncaught(found.exc_type, found.exc_value, found.exc_traceback)


def _uncaught(kind: type[BaseException], error: BaseException | None, where: TracebackType | None) -> None:
    """What nobody caught is told in the format of all other lines."""
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error or kind(), where)
        return
    log("process").critical("uncaught", exc_info=(kind, error or kind(), where))


# -- traces ------------------------------------------------------------------------------------------------


def tracer() -> trace.Tracer:
    """Makes spans; they go nowhere, at next to no cost, unless :func:`setup` was asked to record them."""
    return _tracer_of(trace.get_tracer_provider())


@functools.lru_cache(maxsize=4)
def _tracer_of(provider: trace.TracerProvider) -> trace.Tracer:
    """The library makes a new one at every call, which cost a request of the gateway a 25th of its processor time."""
    return provider.get_tracer("mooncake")


def tracing_wanted(env: Mapping[str, str]) -> bool:
    """Whether spans are sent: the standard variables decide, and nothing else."""
    return not _disabled(env) and env.get("OTEL_TRACES_EXPORTER") != "none" and any(env.get(name) for name in ENDPOINTS)


def _disabled(env: Mapping[str, str]) -> bool:
    return env.get("OTEL_SDK_DISABLED", "").lower() == "true"


# -- metrics -----------------------------------------------------------------------------------------------

M = TypeVar("M", bound=MetricWrapperBase)
_metrics: dict[str, MetricWrapperBase] = {}
_lock = threading.Lock()


def _metric(kind: type[M], name: str, doc: str, labels: Sequence[str], **more: Any) -> M:
    """The same name again is the same metric; ``mooncake_`` goes before names that have no ``system:`` of their own."""
    full = name if name.startswith(PREFIX) or ":" in name else PREFIX + name
    with _lock:
        metric = _metrics.get(full)
        if metric is None:
            metric = _metrics[full] = kind(full, doc, tuple(labels), registry=REGISTRY, **more)
    if type(metric) is not kind or metric._labelnames != tuple(labels):
        raise ValueError(f"metric {full} exists as another kind or with other labels")
    return metric


def counter(name: str, doc: str, labels: Sequence[str] = ()) -> Counter:
    """A monotone count; exposed with ``_total`` at its end. Label values must come from a bounded set."""
    return _metric(Counter, name, doc, labels)


def gauge(name: str, doc: str, labels: Sequence[str] = ()) -> Gauge:
    return _metric(Gauge, name, doc, labels)


def histogram(name: str, doc: str, labels: Sequence[str] = (), buckets: Sequence[float] = SECONDS) -> Histogram:
    return _metric(Histogram, name, doc, labels, buckets=tuple(buckets))


def exemplar() -> dict[str, str] | None:
    """For an observation: the trace that it belongs to, where that is sent (OpenMetrics shows it)."""
    context = trace.get_current_span().get_span_context()
    return {"trace_id": format(context.trace_id, "032x")} if context.trace_flags.sampled else None


class HeldGauge:
    """How much of one kind of resource this process holds now."""

    def __init__(self, held: HeldResources, key: tuple[tuple[str, str], ...]) -> None:
        self._held = held
        self._key = key

    def inc(self, amount: float = 1) -> None:
        self._held.add(self._key, amount)

    def dec(self, amount: float = 1) -> None:
        self._held.add(self._key, -amount)

    def set(self, amount: float) -> None:
        self._held.put(self._key, amount)

    def follow(self, amount: Callable[[], float]) -> None:
        """Ask for the amount whenever it is read, from any thread: for what also ends unseen by its counter."""
        self._held.followed[self._key] = amount

    @property
    def value(self) -> float:
        return self._held.now().get(self._key, 0.0)


class HeldResources(Collector):
    """``mooncake_held{kind=...}``: everything that must be given back. A kind stays visible at 0 after its last use."""

    def __init__(self) -> None:
        self.amounts: dict[tuple[tuple[str, str], ...], float] = {}
        self.followed: dict[tuple[tuple[str, str], ...], Callable[[], float]] = {}
        self._lock = threading.Lock()

    def add(self, key: tuple[tuple[str, str], ...], amount: float) -> None:
        with self._lock:
            self.amounts[key] = self.amounts.get(key, 0.0) + amount

    def put(self, key: tuple[tuple[str, str], ...], amount: float) -> None:
        with self._lock:
            self.amounts[key] = float(amount)

    def now(self) -> dict[tuple[tuple[str, str], ...], float]:
        return self.amounts | {key: float(amount()) for key, amount in list(self.followed.items())}

    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = GaugeMetricFamily(PREFIX + "held", "Resources held now, by kind.")
        for key, amount in self.now().items():
            family.add_sample(PREFIX + "held", dict(key), amount)
        yield family


disable_created_metrics()  # type: ignore[no-untyped-call]
HELD = HeldResources()
REGISTRY.register(HELD)
ProcessCollector(namespace=PREFIX.rstrip("_"), registry=REGISTRY)


def held_gauge(kind: str, **labels: str) -> HeldGauge:
    """For what is held across calls; :func:`held` where a ``with`` block can do it."""
    key = (("kind", kind), *sorted(labels.items()))
    HELD.add(key, 0)
    return HeldGauge(HELD, key)


@contextmanager
def held(kind: str, amount: float = 1, **labels: str) -> Iterator[None]:
    """Counts ``amount`` of ``kind`` as held while the block runs."""
    entry = held_gauge(kind, **labels)
    entry.inc(amount)
    try:
        yield
    finally:
        entry.dec(amount)


async def watch_loop() -> None:
    """Measures for ever how late the running event loop is; :class:`shared.metrics_server.MetricsServer` starts it."""
    lag = histogram("event_loop_lag_seconds", "How late a timer of the event loop fired.")
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_PERIOD
        await asyncio.sleep(LAG_PERIOD)
        lag.observe(max(0.0, loop.time() - due))
