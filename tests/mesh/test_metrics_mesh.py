"""ACCEPTANCE E2, and a real Prometheus that scrapes a mesh under load: each query of a dashboard finds something."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mesh.mesh import Mesh

DEPLOY = Path(__file__).parents[2] / "deploy"
PATIENCE = 120.0
LABEL_VALUES = 40
"""Different values that any label of ours may have."""

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.rig,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus: Debian's package of that name"),
]


@pytest.fixture
def mesh(simulated: Callable[[], Mesh]) -> Mesh:
    return simulated()


@pytest.fixture
async def load(mesh: Mesh) -> AsyncIterator[None]:
    """Answers of all kinds, for as long as the test runs."""

    async def ask(kind: int) -> None:
        for i in range(100_000):
            prompt = [10 + kind] * (64 + 32 * (i % 8))
            await mesh.ask(prompt, stream=bool(kind % 2), max_tokens=64 if kind else 1)

    tasks = [asyncio.create_task(ask(kind)) for kind in range(4)]
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Prometheus:
    def __init__(self, folder: Path, mesh: Mesh) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        cluster = mesh.cluster()
        targets = [one["metrics"] for one in (*cluster["instances"], *cluster["agents"])]
        targets.append(mesh.url.removeprefix("http://"))
        scrapes = [{"job_name": "mooncake", "static_configs": [{"targets": targets}]}]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(DEPLOY / "prometheus" / "rules" / "*.yml")],
            "scrape_configs": scrapes,
        }
        (folder / "prometheus.json").write_text(json.dumps(config))
        self._argv = [
            "prometheus",
            f"--config.file={folder / 'prometheus.json'}",
            f"--storage.tsdb.path={folder / 'data'}",
        ]
        self._argv += [f"--web.listen-address={self.address}", "--enable-feature=exemplar-storage"]
        self._log = folder / "log"

    def __enter__(self) -> Prometheus:
        with self._log.open("wb") as out:
            self._child = subprocess.Popen(self._argv, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._child.kill()
        self._child.wait()

    def get(self, path: str, **parameters: str) -> Any:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)["data"]

    def query(self, expr: str) -> list[Any]:
        """Samples that are numbers: a ratio of nothing to nothing does not count."""
        try:
            found = self.get("query", query=expr)["result"]
        except OSError:
            return []
        return [one for one in found if one["value"][1] != "NaN"]


@pytest.fixture
def prometheus(mesh: Mesh, tmp_path: Path) -> Iterator[Prometheus]:
    with Prometheus(tmp_path, mesh) as prometheus:
        yield prometheus


def queries() -> dict[str, str]:
    """Every query of every dashboard: dashboard/panel -> PromQL."""
    return {
        f"{path.stem}/{panel['title']}/{target['refId']}": target["expr"]
        for path in sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
        for panel in json.loads(path.read_text())["panels"]
        for target in panel.get("targets", ())
    }


async def until(what: Callable[[], Any]) -> Any:
    """The first answer that is not empty; the last one at the end of patience."""
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while not (found := await asyncio.to_thread(what)) and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(1)
    return found


@pytest.mark.usefixtures("load")
async def test_no_query_of_a_dashboard_is_empty(prometheus: Prometheus) -> None:
    wanted = queries()
    assert len(wanted) > 40

    def all_found() -> bool:
        return all(map(prometheus.query, wanted.values()))

    await until(all_found)
    assert [name for name, expr in wanted.items() if not prometheus.query(expr)] == []
    rules = prometheus.get("rules")["groups"]
    assert {rule["health"] for group in rules for rule in group["rules"]} == {"ok"}


@pytest.mark.usefixtures("load")
async def test_slow_answers_lead_to_their_traces(mesh: Mesh, prometheus: Prometheus) -> None:
    def exemplars() -> Any:
        try:
            now = time.time()
            return prometheus.get(
                "query_exemplars", query="mooncake_gateway_ttft_seconds_bucket", start=str(now - 60), end=str(now)
            )
        except OSError:
            return []

    found = await until(exemplars)
    assert found and len(found[0]["exemplars"][0]["labels"]["trace_id"]) == 32


@pytest.mark.usefixtures("load")
async def test_metrics_of_every_service_parse_and_their_labels_are_bounded(mesh: Mesh) -> None:
    await mesh.ask("an unknown model", model="no-such-model-" + "x" * 40)
    pages = await asyncio.to_thread(mesh.scrapes)
    assert len(pages) == 5
    for name, page in pages.items():
        done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, timeout=60)
        complaints = [line for line in done.stderr.splitlines() if "vllm:" not in line]  # their names are not ours
        assert not complaints, f"{name}: {complaints}"
        assert "no-such-model" not in page
        values: dict[str, set[str]] = {}
        for line in page.splitlines():
            for pair in line.partition("{")[2].partition("}")[0].split(",") if not line.startswith("#") else ():
                label, _, value = pair.partition("=")
                values.setdefault(label, set()).add(value)
        values.pop("le", None)  # buckets are of the code
        assert {label: len(seen) for label, seen in values.items() if len(seen) > LABEL_VALUES} == {}
