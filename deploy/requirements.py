"""Prints the requirements of pyproject.toml, one a line: the core's, or those of the extra that is named.

So an image's dependencies are a layer of their own, which a change of our code leaves as it is.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main(extra: str = "") -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["optional-dependencies"][extra] if extra else project["dependencies"]
    print(*wanted, sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
