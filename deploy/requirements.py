"""Prints the requirements of pyproject.toml, one a line: of the extras that are named; "" or none is the core.

So an image's dependencies are a layer of their own, which a change of our code leaves as it is.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main(*extras: str) -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra in extras or ("",):
        print(*(project["optional-dependencies"][extra] if extra else project["dependencies"]), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
