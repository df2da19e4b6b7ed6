"""Which tests stay together on one worker, and which units of them begin first: those that take longest."""

from __future__ import annotations

WALK = (
    "tests/mesh/test_completions_mesh.py",
    "tests/mesh/test_cancel_mesh.py",
    "tests/mesh/test_corruption_mesh.py::test_verify_always",
)
UNVERIFIED = ("tests/mesh/test_answers_mesh.py", "tests/mesh/test_corruption_mesh.py::test_verify_off")
SIMULATED = (
    *("tests/mesh/test_surface_mesh.py", "tests/mesh/test_streams_mesh.py", "tests/mesh/test_metrics_mesh.py"),
    *("tests/mesh/test_leaks_mesh.py", "tests/mesh/test_load_mesh.py"),
)

LONGEST = (
    "clients",
    "walk tcp",
    "walk shm",
    "unverified",
    "tests/mesh/test_text_mesh.py",
    "simulated",
    "tests/mesh/test_chat_mesh.py",
    "tests/cli/test_up.py",
    "tests/mesh/test_ssd_mesh.py",
    "tests/mesh/test_trace_mesh.py",
    "tests/instance/test_host.py",
    "tests/mesh/test_isolation_mesh.py",
)
"""What is long begins first, so that the workers of a parallel run end together. The rest follows as it was found."""


def unit_of(nodeid: str) -> str:
    """A file, but for those that share what is dear: a mesh of the same shape, or the import of clients."""
    if nodeid.startswith("tests/clients/"):
        return "clients"
    if nodeid.startswith(WALK):
        return "walk tcp" if "tcp" in nodeid else "walk shm"
    if nodeid.startswith(UNVERIFIED):
        return "unverified"
    return "simulated" if nodeid.startswith(SIMULATED) else nodeid.partition("::")[0]


def rank(nodeid: str) -> int:
    """By what tests are sorted before they are handed out."""
    unit = unit_of(nodeid)
    return LONGEST.index(unit) if unit in LONGEST else len(LONGEST)
