"""Prints line coverage by package from the data that the last test run left: a dozen lines, not a file a line."""

from __future__ import annotations

import io
import sys
from collections import defaultdict
from pathlib import Path

import coverage

ROOT = Path(__file__).resolve().parent.parent


def package(path: Path) -> str:
    """``services/store/transfer/tcp.py`` -> ``services/store``; ``shared/blocks.py`` -> ``shared``."""
    parts = path.parts[:-1]
    return "/".join(parts[: 2 if parts[:1] == ("services",) else 1]) or "."


def main() -> int:
    data = coverage.Coverage(config_file=str(ROOT / "pyproject.toml"), messages=False)
    data.load()
    totals: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name in data.get_data().measured_files():
        path = Path(name)
        if not path.is_file() or not path.is_relative_to(ROOT):
            continue
        _, statements, _, missing, _ = data.analysis2(name)
        if not statements:
            continue
        for key in (package(path.relative_to(ROOT)), "all"):
            totals[key][0] += len(statements)
            totals[key][1] += len(statements) - len(missing)
    out = io.StringIO()
    out.write(f"{'coverage by package':<24}{'lines':>8}{'run':>8}{'%':>7}\n")
    for name in sorted(totals, key=lambda key: (key == "all", key)):
        lines, run = totals[name]
        out.write(f"{name:<24}{lines:>8}{run:>8}{100 * run / max(lines, 1):>7.1f}\n")
    sys.stdout.write(out.getvalue())
    return 0


if __name__ == "__main__":
    sys.exit(main())
