"""Prometheus' own tools on our rules, and dashboards that are what their source makes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = sorted((DEPLOY / "prometheus" / "rules").glob("*.yml"))

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: Debian's package prometheus")


def promtool(*argv: str | Path, stdin: str | None = None) -> str:
    done = subprocess.run(["promtool", *argv], input=stdin, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.rig
@needs_promtool
def test_rules_are_valid_and_do_what_they_should() -> None:
    assert len(RULES) == 2
    promtool("check", "rules", *RULES)
    promtool("test", "rules", *sorted((DEPLOY / "prometheus").glob("*.test.yml")))


@pytest.mark.rig
@needs_promtool
def test_the_configuration_is_valid() -> None:
    promtool("check", "config", "--syntax-only", DEPLOY / "prometheus" / "prometheus.yml")


def test_dashboards_are_what_their_source_makes() -> None:
    source = DEPLOY / "grafana" / "dashboards.py"
    done = subprocess.run([sys.executable, source, "--check"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
