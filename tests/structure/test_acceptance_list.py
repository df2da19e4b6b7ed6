"""The lists of accepted behaviours, the store's and the conductor's: they name tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "docs/evidence/store-tests.md"
WANTED = {"A1", "B1c", *(f"C{number}" for number in range(1, 14))}
OF_THE_CONDUCTOR = ROOT / "docs/evidence/scheduling-tests.md"
CONDUCTORS = {"A7", "B4", "B6", "E3", *(f"D{number}" for number in range(1, 9))}
ROW = re.compile(r"^\| (?P<what>[A-E]\d+c?) \| `(?P<test>[^`]+)` \| (?P<over>[^|]+) \|$", re.MULTILINE)
NAMED = re.compile(r"test_(b1c|c\d+)_")
OVER = {
    "tests/transfer": {"world": "tcp, tls, shm", "tcp_world": "tcp, tls", "plain_world": "tcp, shm"},
    "tests/store": {"transport": "tcp, shm"},
    "tests/rdma": {"world": "rdma", "kit": "rdma"},
}
"""By folder: which argument of a test means which transports (see the conftest.py there)."""
ELSEWHERE = {"as agents choose", "none"}


@cache
def functions_of(file: Path) -> dict[str, set[str]]:
    """Test -> its arguments."""
    tree = ast.parse(file.read_text())
    found = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {node.name: {arg.arg for arg in node.args.args} for node in found if node.name.startswith("test_")}


def transports(name: str) -> set[str]:
    """What the list may say of a test."""
    file, _, test = name.partition("::")
    folder = str(Path(file).parent)
    if file.endswith("_tls.py"):
        return {"tls"}
    constant = re.search(r"^TRANSPORTS = (\[.*\])$", (ROOT / file).read_text(), re.MULTILINE)
    if constant is not None:
        return {", ".join(ast.literal_eval(constant[1]))}
    said = {over for argument, over in OVER.get(folder, {}).items() if argument in functions_of(ROOT / file)[test]}
    return said or ELSEWHERE


def test_each_behaviour_has_tests_that_exist_and_run_over_what_is_said() -> None:
    rows = [match.groupdict() for match in ROW.finditer(LIST.read_text())]
    assert {row["what"] for row in rows} == WANTED
    for row in rows:
        file, _, test = row["test"].partition("::")
        assert (ROOT / file).is_file(), row
        assert test in functions_of(ROOT / file), row
        assert row["over"] in transports(row["test"]), row


def test_no_test_of_a_behaviour_is_left_out() -> None:
    listed = {(match["what"], match["test"]) for match in ROW.finditer(LIST.read_text())}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        if file.parent.name in ("store", "transfer", "rdma"):
            for test in functions_of(file):
                if named := NAMED.match(test):
                    what = "B1c" if named[1] == "b1c" else named[1].upper()
                    assert (what, f"{file.relative_to(ROOT)}::{test}") in listed


def test_each_behaviour_of_the_conductor_has_tests_that_exist() -> None:
    rows = [match.groupdict() for match in ROW.finditer(OF_THE_CONDUCTOR.read_text())]
    assert {row["what"] for row in rows} == CONDUCTORS
    for row in rows:
        file, _, test = row["test"].partition("::")
        assert (ROOT / file).is_file() and test in functions_of(ROOT / file), row
        assert test.startswith(f"test_{row['what'].lower()}_"), row
