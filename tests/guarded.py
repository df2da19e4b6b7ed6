"""Processes that tests start, and their children, end with the pytest that started them, also after ``kill -9``."""

from __future__ import annotations

import os
from collections.abc import Callable
from uuid import uuid4

from cli.supervisor import Warden

RUN = "MESH_TEST_RUN"
"""Variable in the environment of everything that a pytest process has started. Each worker of a parallel run has its
own value, and is itself one of what the first process has started."""


def guard() -> Callable[[], None]:
    """From now on, until what is returned is called, or this process is dead: then all of it is killed."""
    os.environ[RUN] = uuid4().hex
    return Warden(os.environ[RUN], RUN).close
