"""Writes the dashboards: ``python deploy/grafana/dashboards.py`` (``--check``: are the files what this makes?).

A panel is a line here and forty in Grafana's JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "dashboards"
SOURCE = {"type": "prometheus", "uid": "prometheus"}
WIDTH, HEIGHT = 8, 8
PER_ROW = 24 // WIDTH


@dataclass(frozen=True)
class Panel:
    """``queries``: legend -> PromQL. ``unit`` in Grafana's words."""

    title: str
    queries: dict[str, str]
    unit: str = "short"
    about: str = ""
    kind: str = "timeseries"
    most: float | None = None


@dataclass(frozen=True)
class Dashboard:
    uid: str
    title: str
    rows: dict[str, list[Panel]] = field(default_factory=dict)


def quantiles(metric: str, window: str = "5m", by: str = "") -> dict[str, str]:
    labels = ", ".join(["le", *([by] if by else [])])
    legend = f"{{{{{by}}}}} " if by else ""
    return {
        f"{legend}p{int(100 * q)}": f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket[{window}])))"
        for q in (0.5, 0.9, 0.99)
    }


def rate(metric: str, by: str, more: str = "") -> dict[str, str]:
    return {f"{{{{{by}}}}}": f"sum by ({by}) (rate({metric}{more}[5m]))"}


MESH = Dashboard(
    "mooncake-mesh",
    "Mooncake: what users see",
    {
        "Objectives": [
            Panel(
                "Effective requests",
                {
                    "last 5 min": "mooncake:effective_requests:ratio5m",
                    "last hour": "mooncake:effective_requests:ratio1h",
                },
                "percentunit",
                "Those that met both latency objectives, of all that were not cancelled.",
                most=1,
            ),
            Panel("Requests by objective", rate("mooncake_gateway_requests_by_objective_total", "result"), "reqps"),
            Panel(
                "Goodput and throughput",
                {
                    "goodput": "mooncake:goodput_tokens:rate5m",
                    "all tokens": "sum(rate(mooncake_gateway_completion_tokens_total[5m]))",
                },
                "none",
                "Tokens a second; goodput counts answers that met their objectives.",
            ),
            Panel("Time to first token", quantiles("mooncake_gateway_ttft_seconds"), "s"),
            Panel(
                "Time between tokens",
                quantiles("mooncake_gateway_tbt_worst_tenth_seconds"),
                "s",
                "Of each answer: the mean of the worst tenth of its intervals.",
            ),
            Panel(
                "Requests by outcome",
                rate("mooncake_gateway_requests_total", "outcome", '{route=~".*completions"}'),
                "reqps",
            ),
        ],
        "Cache": [
            Panel(
                "Prefix hits by token",
                {"last 5 min": "mooncake:prefix_hit:ratio5m", "last hour": "mooncake:prefix_hit:ratio1h"},
                "percentunit",
                most=1,
            ),
            Panel("KV moved between nodes", rate("mooncake_store_transfer_bytes_total", "transport"), "Bps"),
            Panel("Placements", rate("mooncake_conductor_placements_total", "prefix"), "reqps"),
        ],
        "Prediction and scheduling": [
            Panel("Actual over predicted", quantiles("mooncake_conductor_ttft_prediction_ratio"), "none"),
            Panel("Decision, CPU time", quantiles("mooncake_conductor_decision_cpu_seconds"), "s"),
            Panel("Instances alive", {"{{role}}": 'max by (role) (mooncake_conductor_instances{state="alive"})'}),
        ],
    },
)

ENGINES = Dashboard(
    "mooncake-engines",
    "Mooncake: engines and stores",
    {
        "Prefill": [
            Panel("Wait in the queue", quantiles("mooncake_prefill_queue_seconds"), "s"),
            Panel("Computing a prompt", quantiles("mooncake_prefill_seconds"), "s"),
            Panel(
                "Prompt tokens",
                {
                    "computed": "sum(rate(mooncake_prefill_tokens_total[5m]))",
                    "from the cache": "sum(rate(mooncake_prefill_cached_tokens_total[5m]))",
                },
                "none",
            ),
        ],
        "Decode": [
            Panel("A step", quantiles("mooncake_decode_step_seconds"), "s"),
            Panel("Tokens drawn", {"{{instance}}": "rate(mooncake_decode_tokens_total[5m])"}, "none"),
            Panel(
                "Pool taken",
                {"{{instance}}": "vllm:kv_cache_usage_perc"},
                "percentunit",
                "By running requests and by promises to others.",
                most=1,
            ),
            Panel("Running", {"{{instance}}": "vllm:num_requests_running"}),
            Panel("Waiting", {"{{instance}}": "vllm:num_requests_waiting"}),
        ],
        "Stores": [
            Panel("Slots", {"{{instance}} {{state}}": "mooncake_store_slots"}),
            Panel("Blocks committed", {"{{instance}}": "rate(mooncake_store_committed_blocks_total[5m])"}),
            Panel("Blocks evicted", {"{{instance}}": "rate(mooncake_store_evicted_blocks_total[5m])"}),
            Panel("Lookups by engines", rate("mooncake_store_lookup_blocks_total", "result")),
        ],
        "Processes": [
            Panel("Event loop late", quantiles("mooncake_event_loop_lag_seconds", by="instance"), "s"),
            Panel("Held", {"{{instance}} {{kind}}": 'mooncake_held{kind!~".*connections"} > 0'}),
            Panel("CPU", {"{{instance}}": "rate(mooncake_process_cpu_seconds_total[5m])"}),
            Panel("Memory", {"{{instance}}": "mooncake_process_resident_memory_bytes"}, "bytes"),
        ],
    },
)


def panel_json(panel: Panel, id: int, x: int, y: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 8, "showPoints": "never"}}
    if panel.most is not None:
        defaults["max"] = panel.most
    targets = [
        {
            "refId": chr(ord("A") + i),
            "expr": expr,
            "legendFormat": legend,
            "datasource": SOURCE,
            "exemplar": "_bucket" in expr,
        }
        for i, (legend, expr) in enumerate(panel.queries.items())
    ]
    return {
        "id": id,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def dashboard_json(dashboard: Dashboard) -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in dashboard.rows.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
                "panels": [],
            }
        )
        y += 1
        for i, panel in enumerate(row):
            at = y + HEIGHT * (i // PER_ROW)
            panels.append(panel_json(panel, len(panels) + 1, WIDTH * (i % PER_ROW), at))
        y += HEIGHT * -(-len(row) // PER_ROW)
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["mooncake"],
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "panels": panels,
    }


def files() -> dict[Path, str]:
    made = {"mesh": MESH, "engines": ENGINES}
    return {FOLDER / f"{name}.json": json.dumps(dashboard_json(one), indent=1) + "\n" for name, one in made.items()}


def main(argv: list[str]) -> int:
    stale = [path for path, text in files().items() if not path.is_file() or path.read_text() != text]
    if argv == ["--check"]:
        print(*(f"{path.name} is stale: python deploy/grafana/dashboards.py" for path in stale), sep="\n")
        return bool(stale)
    for path, text in files().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
