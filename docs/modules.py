"""Writes the line per module in ``docs/architecture.md`` from the modules' own docstrings (``make docs``)."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- modules: written by docs/modules.py -->", "<!-- modules end -->"


def summary(path: Path) -> str:
    """First sentence or line of a module's docstring."""
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(doc.split("\n\n")[0].split())


def lines() -> list[str]:
    """Packages as headings, modules as lines, in the order of the tree."""
    out: list[str] = []
    for top in ("shared", "services", "simulator", "cli", "benchmarks"):
        for package in sorted(p.parent for p in (ROOT / top).rglob("__init__.py")):
            out += ["", f"**{package.relative_to(ROOT)}/** {summary(package / '__init__.py')}", ""]
            for module in sorted(package.glob("*.py")):
                if module.name != "__init__.py":
                    out.append(f"- `{module.name}`: {summary(module)}")
    return out


def page(text: str) -> str:
    """The page with the part between the markers written anew."""
    head, rest = text.split(BEGIN)
    return "\n".join([head + BEGIN, *lines(), "", END]) + rest.split(END)[1]


def main() -> int:
    old = PAGE.read_text()
    new = page(old)
    if "--check" in sys.argv:
        if old != new:
            print("docs/architecture.md: the line per module is stale; run make docs", file=sys.stderr)
        return int(old != new)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
