"""Who may import whom, and what must never be loaded where."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("conductor", "decode", "prefill", "store")
HEAVY = ("torch", "transformers", "vllm", "pyverbs")
STORE_CLIENT = "services.store.client"

STORE_INSPECTION = "services.store.inspection"
"""What ``mooncake store`` looks into stores with, as a peer of their agents."""

SCHEDULING = "services.conductor.scheduling"
"""Pure, and the simulator runs these very objects."""

MAY_USE_THE_STORE = ("services.prefill", "services.decode", "cli")
"""Besides the store itself; and by its client only."""


def modules(folder: str) -> list[str]:
    """Dotted names of all modules below a folder of the project."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    return [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]


def imports(path: Path) -> Iterator[str]:
    """Every module that a file names in an import, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return ".".join(parts[: 2 if parts[0] == "services" and len(parts) > 2 else 1])


def allowed(importer: str, imported: str) -> bool:
    """Rules of the layout: nobody imports a service but itself, except for the store's client."""
    parts = imported.split(".")
    if parts[0] == "cli":
        return importer == "cli"
    if parts[0] == "simulator":
        return importer in ("simulator", "cli")
    if parts[0] != "services" or len(parts) < 2:
        return True
    if imported == STORE_CLIENT or imported.startswith(STORE_CLIENT + "."):
        return importer in (*MAY_USE_THE_STORE, "services.store")
    if imported == STORE_INSPECTION and importer == "cli":
        return True
    if importer == "simulator":
        return imported == SCHEDULING or imported.startswith(SCHEDULING + ".")
    return importer == ".".join(parts[:2])


def test_no_file_imports_what_it_must_not() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for folder in ("services", "shared", "simulator", "cli")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in imports(path)
        if not allowed(package_of(path), name)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("importer", "imported", "verdict"),
    [
        ("shared", "services.store.client", False),
        ("services.conductor", "services.store.client", False),
        ("services.prefill", "services.store.client", True),
        ("services.prefill", "services.store.agent", False),
        ("services.prefill", "services.decode.batch", False),
        ("services.store", "services.store.pool", True),
        ("cli", "services.conductor.settings", False),
        ("cli", "services.store.inspection", True),
        ("cli", "services.store.agent", False),
        ("services.prefill", "services.store.inspection", False),
        ("services.store", "cli.plan", False),
        ("simulator", "services.conductor.scheduling.pricing", True),
        ("simulator", "services.conductor.dispatch.run", False),
        ("cli", "simulator.cost", True),
        ("services.conductor", "simulator.cost", False),
        ("services.store", "shared.blocks", True),
        ("services.store", "asyncio", True),
    ],
)
def test_the_rules_say_what_the_layout_says(importer: str, imported: str, verdict: bool) -> None:
    assert allowed(importer, imported) is verdict


def loaded_after(names: list[str], cwd: Path | None = None) -> set[str]:
    """Top-level packages in memory after a fresh interpreter has imported the modules."""
    code = (
        "import importlib, json, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("service", ["conductor", "store"])
def test_a_conductor_and_a_store_load_no_engine(service: str) -> None:
    loaded = loaded_after(modules(f"services/{service}"))
    assert not loaded & set(HEAVY)


@pytest.mark.parametrize("service", ["prefill", "decode"])
def test_settings_of_an_instance_load_no_engine(service: str) -> None:
    assert not loaded_after([f"services.{service}.settings"]) & set(HEAVY)


def test_the_command_loads_no_engine() -> None:
    assert not loaded_after(modules("cli")) & set(HEAVY)


def test_shared_is_ours_from_any_working_folder(tmp_path: Path) -> None:
    """Other folders called like our packages lie where people work; theirs must not be taken for ours."""
    for name in ("shared", "services", "cli"):
        (tmp_path / name).mkdir()
    code = "import shared, services, cli; print(shared.__file__, services.__file__, cli.__file__, sep='\\n')"
    for folder in (tmp_path, ROOT.parent, ROOT, Path("/")):
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        assert [Path(line).parent for line in done.stdout.split()] == [ROOT / n for n in ("shared", "services", "cli")]


def test_the_import_contracts_hold() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
