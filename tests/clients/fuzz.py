"""Schemathesis against a live mesh, by the description that it serves itself: ``python -m tests.clients.fuzz``."""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.clients.live import KEY, live_mesh
from tests.mesh.mesh import MODEL, Mesh

SCHEMATHESIS = Path(sys.executable).parent / "schemathesis"
CONFIG, HOOKS = (Path(__file__).with_name(name) for name in ("schemathesis.toml", "schemathesis_hooks.py"))
SECRET = f"Authorization: Bearer {KEY}"
OPTIONS = (
    "--phases=examples,coverage,fuzzing",
    "--mode=all",
    "--checks=all",
    "--exclude-checks=positive_data_acceptance",  # for `described_is_accepted`
    "--continue-on-failure",
    "--generation-database=none",
    "--suppress-health-check=all",
    "--request-timeout=60",
    "--no-color",
    "--output-sanitize=false",
)


def fuzz(mesh: Mesh, folder: Path, *options: str, patience: float) -> subprocess.CompletedProcess[str]:
    """One run of it; ``returncode`` 0: nothing found. ``patience`` in seconds. Reports lie in ``folder``."""
    argv = [str(SCHEMATHESIS), f"--config-file={CONFIG}", "run", mesh.url + "/openapi.json", "-H", SECRET]
    return subprocess.run(
        [*argv, *OPTIONS, *options],
        cwd=folder,
        env=os.environ | {"SCHEMATHESIS_HOOKS": str(HOOKS)},
        capture_output=True,
        text=True,
        timeout=patience,
        check=False,
    )


async def unharmed(mesh: Mesh, instances: Sequence[object]) -> None:
    """Raises AssertionError where the mesh is not as it was before."""
    assert await mesh.settled(within=10.0) == {}
    assert (await mesh.ask([11, 12, 13])).status == 200
    assert incarnations(mesh) == instances, "an instance was started anew"


def incarnations(mesh: Mesh) -> list[tuple[str, str]]:
    return sorted((one["id"], one["incarnation"]) for one in mesh.cluster()["instances"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description="Fuzz a live mesh by its own OpenAPI description.")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, help="of an earlier run; by default another one each time")
    own, further = parser.parse_known_args(arguments)
    from shared.engines.tiny import make_tiny_model

    seed = [] if own.seed is None else [f"--seed={own.seed}"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with live_mesh(make_tiny_model(folder / MODEL), folder) as mesh:
            before = incarnations(mesh)
            options = [f"--max-time={own.seconds}", "--max-examples=1000000", *seed, *further]
            done = fuzz(mesh, folder, *options, patience=own.seconds + 300)
            print(done.stdout, done.stderr, sep="\n")
            asyncio.run(unharmed(mesh, before))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
