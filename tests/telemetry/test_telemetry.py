"""Logs, traces and metrics: what a line carries, what is exported when, what is held."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared import telemetry, tracing
from shared.config import CommonSettings
from shared.errors import ConfigError
from shared.metrics_server import MetricsServer, render
from tests.held import held_now


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def json_lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


# -- logs --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("restored_logging")
def test_json_lines_carry_service_logger_level_and_what_is_bound(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry.setup("store", CommonSettings(log_format="json"))
    with telemetry.bound(request="r1", attempt=2):
        telemetry.log("store.agent").info("evicted", blocks=3)
        logging.getLogger("library").warning("hello %s", "you")
    telemetry.log("store.agent").info("outside")
    ours, library, outside = json_lines(capsys)
    assert ours["event"] == "evicted" and ours["blocks"] == 3 and ours["level"] == "info"
    assert ours["service"] == "store" and ours["logger"] == "store.agent"
    assert ours["request"] == library["request"] == "r1" and ours["attempt"] == 2
    assert library["event"] == "hello you"
    assert "request" not in outside


@pytest.mark.usefixtures("restored_logging")
async def test_what_is_bound_follows_the_tasks_started_inside(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry.setup("store", CommonSettings(log_format="json"))

    async def work() -> None:
        await asyncio.sleep(0)
        telemetry.log("x").info("inside")

    with telemetry.bound(request="r7"):
        task = asyncio.create_task(work())
    await task
    assert json_lines(capsys)[0]["request"] == "r7"


@pytest.mark.usefixtures("restored_logging")
def test_lines_below_the_level_and_library_chatter_are_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry.setup("store", CommonSettings(log_format="json", log_level="info"))
    telemetry.log("x").debug("no")
    logging.getLogger("aiohttp.access").info("no")
    telemetry.log("x").info("yes")
    assert [line["event"] for line in json_lines(capsys)] == ["yes"]


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize("log_format", ["console", "json"])
def test_an_exception_is_logged_without_the_values_of_variables(
    capsys: pytest.CaptureFixture[str], log_format: str
) -> None:
    telemetry.setup("store", CommonSettings(log_format="console" if log_format == "console" else "json"))
    password = "hunter2"
    try:
        raise ValueError(f"bad {len(password)}")
    except ValueError:
        telemetry.log("x").exception("failed")
    text = capsys.readouterr().err
    assert "ValueError: bad 7" in text and "hunter2" not in text


def test_before_setup_lines_go_to_stderr_without_the_values_of_variables() -> None:
    code = (
        "from shared.telemetry import log\n"
        "def f(password):\n    raise ValueError('broken')\n"
        "try:\n    f('hunter' + '2')\n"
        "except ValueError:\n    log('x').exception('failed', blocks=3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200)
    assert done.stdout == ""
    assert "failed" in done.stderr and "blocks=3" in done.stderr and "ValueError: broken" in done.stderr
    assert "hunter2" not in done.stderr


@pytest.mark.usefixtures("restored_logging")
def test_a_line_inside_a_span_names_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    from opentelemetry import trace

    telemetry.setup("store", CommonSettings(log_format="json"))
    context = trace.SpanContext(0xABC, 0xDEF, is_remote=True)
    with trace.use_span(trace.NonRecordingSpan(context)):
        telemetry.log("x").info("inside")
    line = json_lines(capsys)[0]
    assert line["trace"] == format(0xABC, "032x") and line["span"] == format(0xDEF, "016x")


# -- traces ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_SERVICE_NAME": "x"}, False),
    ],
)
def test_the_standard_variables_turn_tracing_on(env: dict[str, str], wanted: bool) -> None:
    assert telemetry.tracing_wanted(env) is wanted


def in_fresh_python(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200, check=True
    )
    return done.stdout.strip()


def test_where_no_spans_are_kept_or_sent_the_sdk_is_not_even_imported() -> None:
    code = (
        "import sys; from shared import telemetry; from shared.config import CommonSettings\n"
        "telemetry.setup('store', CommonSettings(trace_requests=0))\n"
        "with telemetry.tracer().start_as_current_span('x') as span: recording = span.is_recording()\n"
        "print(recording, any(m.startswith('opentelemetry.sdk.trace') for m in sys.modules), 'torch' in sys.modules)"
    )
    assert in_fresh_python(code) == "False False False"


def test_with_an_endpoint_spans_are_recorded_under_the_services_name() -> None:
    code = (
        "from opentelemetry import trace; from shared import telemetry; from shared.config import CommonSettings\n"
        "telemetry.setup('store', CommonSettings())\n"
        "span = telemetry.tracer().start_span('x')\n"
        "print(span.is_recording(), trace.get_tracer_provider().resource.attributes['service.name'])"
    )
    assert in_fresh_python(code, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9") == "True mooncake-store"


@pytest.mark.parametrize(
    "fault",
    [
        "import warnings; warnings.warn('odd', stacklevel=1)",
        "import logging; logging.getLogger('a.library').warning('odd %s', 1)",
        "import threading; thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()",
        "raise ValueError('odd\\nand long')",
    ],
)
def test_every_line_of_a_process_is_json_where_json_is_wanted(fault: str) -> None:
    code = (
        "from shared import telemetry; from shared.config import CommonSettings\n"
        f"telemetry.setup('store', CommonSettings(log_format='json'))\n{fault}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    (line,) = done.stderr.splitlines()
    told = json.loads(line)
    assert told["service"] == "store" and told["level"] in ("warning", "critical")
    assert "odd" in line or "ZeroDivisionError" in told["exception"]
    assert done.returncode == ("raise" in fault)


def test_a_protocol_that_there_is_not_ends_a_process_in_one_line() -> None:
    code = (
        "from shared import telemetry; from shared.config import CommonSettings\n"
        "telemetry.setup('store', CommonSettings(log_format='json'))"
    )
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert "http/protobuf and grpc are known" in json.loads(done.stderr)["error"]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "carrier pigeon"}, "OTEL_EXPORTER_OTLP_PROTOCOL is carrier pigeon"),
        ({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"}, "http/protobuf and grpc are known"),
    ],
)
def test_a_protocol_that_there_is_not_is_refused_by_name(variables: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tracing.make_exporter(variables)


# -- metrics -----------------------------------------------------------------------------------------------


def test_metrics_get_the_prefix_and_the_same_name_is_the_same_metric() -> None:
    first = telemetry.counter("test_things", "Things.", ["kind"])
    assert telemetry.counter("mooncake_test_things", "Things.", ["kind"]) is first
    first.labels("a").inc(2)
    assert telemetry.REGISTRY.get_sample_value("mooncake_test_things_total", {"kind": "a"}) == 2
    telemetry.gauge("vllm:num_requests_running", "Compatible.").set(3)
    assert telemetry.REGISTRY.get_sample_value("vllm:num_requests_running") == 3


def test_another_kind_or_other_labels_under_the_same_name_are_refused() -> None:
    telemetry.histogram("test_seconds", "Seconds.")
    with pytest.raises(ValueError, match="another kind"):
        telemetry.gauge("test_seconds", "Seconds.")
    with pytest.raises(ValueError, match="other labels"):
        telemetry.histogram("test_seconds", "Seconds.", ["role"])


def test_held_counts_while_the_block_runs_also_when_it_fails() -> None:
    gauge = telemetry.held_gauge("test_slots", role="prefill")
    with telemetry.held("test_slots", 3, role="prefill"), telemetry.held("test_slots", role="decode"):
        assert gauge.value == 3 and held_now()["test_slots"] == 4
    with pytest.raises(KeyError), telemetry.held("test_slots", role="prefill"):
        raise KeyError
    assert held_now()["test_slots"] == 0
    labels = {"kind": "test_slots", "role": "prefill"}
    assert telemetry.REGISTRY.get_sample_value("mooncake_held", labels) == 0, "visible at 0 after its last use"
    gauge.set(7)
    gauge.dec(7)
    assert gauge.value == 0


def test_held_is_exact_from_many_threads() -> None:
    gauge = telemetry.held_gauge("test_threads")

    def work() -> None:
        for _ in range(2000):
            gauge.inc()
            gauge.dec()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gauge.value == 0


def test_all_metrics_parse_and_have_base_units() -> None:
    telemetry.counter("test_moved_bytes", "Bytes.").inc()
    body, content_type = render()
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    assert content_type.startswith("text/plain")
    assert {"mooncake_held", "mooncake_process_cpu_seconds", "mooncake_process_resident_memory_bytes"} <= set(families)
    assert not [name for name in families if name.endswith("_created")]
    assert render("application/openmetrics-text")[0].rstrip().endswith(b"# EOF")


# -- the server --------------------------------------------------------------------------------------------

LAGS = "mooncake_event_loop_lag_seconds_count"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_metrics_and_health_are_served(host: str) -> None:
    async with MetricsServer(host, 0) as server, aiohttp.ClientSession() as session:
        base = f"http://[{host}]:{server.port}" if ":" in host else f"http://{host}:{server.port}"
        async with session.get(base + "/health") as response:
            assert response.status == 200 and await response.json() == {"status": "ok"}

        async def measured() -> float:
            async with session.get(base + "/metrics") as response:
                assert response.status == 200
                families = text_string_to_metric_families(await response.text())
                return next((s.value for f in families for s in f.samples if s.name == LAGS), 0.0)

        before = await measured()
        async with asyncio.timeout(100):
            while await measured() < before + 2:
                await asyncio.sleep(telemetry.LAG_PERIOD)
        async with session.get(base + "/nothing") as response:
            assert response.status == 404


async def test_healthy_from_the_start_and_ready_when_nothing_hinders() -> None:
    async with MetricsServer("127.0.0.1", 0) as server, aiohttp.ClientSession() as session:

        async def ready() -> tuple[int, list[str]]:
            async with session.get(f"http://127.0.0.1:{server.port}/ready") as response:
                answer = await response.json()
                assert answer["ready"] is (response.status == 200)
                return response.status, answer["reasons"]

        assert await ready() == (503, ["starting"])
        server.hindrances = list
        assert await ready() == (200, [])
        server.hindrances = lambda: ["draining", "no_agent"]
        assert await ready() == (503, ["draining", "no_agent"])


async def test_port_minus_one_serves_nothing() -> None:
    async with MetricsServer("127.0.0.1", -1) as server:
        assert server.port == -1


async def test_a_taken_port_is_a_clear_error_and_leaves_nothing_running() -> None:
    before = len(asyncio.all_tasks())
    async with MetricsServer("127.0.0.1", 0) as server:
        with pytest.raises(ConfigError, match=f"127.0.0.1:{server.port}"):
            await MetricsServer("127.0.0.1", server.port).start()
    assert len(asyncio.all_tasks()) == before


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text;version=1.0.0", "application/openmetrics-text"])
@pytest.mark.parametrize("escaping", ["", ";escaping=underscores", ";escaping=allow-utf-8", ";escaping=values"])
def test_names_are_the_same_in_every_format(accept: str, escaping: str) -> None:
    telemetry.gauge("vllm:num_requests_running", "Compatible.").set(3)
    body, content_type = render(accept + escaping if accept else "")
    assert b"\nvllm:num_requests_running 3" in body and "escaping" not in content_type


def test_a_thread_that_ends_itself_is_no_fault() -> None:
    script = "import sys, threading; from shared import telemetry; telemetry._setup_logs('x', 'info', False);"
    script += "t = threading.Thread(target=sys.exit); t.start(); t.join()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stderr == ""
