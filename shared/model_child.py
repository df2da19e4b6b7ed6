"""A child process of the model fetch: output kept for messages, a deadline, and never longer life than its parent."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from shared.embedded import die_with_parent

TELLING = ("ERROR:", "Error", "No space left")
LOG_BYTES = 16384


class Child:
    """Runs ``command`` while the context lasts; leaving it kills what still runs. Output goes to the file ``log``.

    It inherits the descriptor ``keep``, and is killed ``timeout`` seconds after its start.
    """

    def __init__(
        self, command: Sequence[str], log: Path, keep: int, environment: Mapping[str, str], timeout: float
    ) -> None:
        root = str(Path(__file__).resolve().parents[1])  # `shared` must be importable wherever we were started
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._log = log
        self._until = time.monotonic() + timeout
        self._late = False
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path, **environment},
                pass_fds=(keep,),
                preexec_fn=die_with_parent(),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def ended(self, wait: float) -> bool:
        """Whether it ends within ``wait`` seconds."""
        try:
            self._process.wait(wait)
        except subprocess.TimeoutExpired:
            if time.monotonic() > self._until:
                self._late = True
                self._process.kill()
            return False
        return True

    @property
    def failed(self) -> bool:
        return self._process.returncode != 0

    def reason(self) -> str:
        """The most telling line of its last output, for a message."""
        if self._late:
            return "it took too long"
        with self._log.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_BYTES))
            text = log.read().decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        telling = [line for line in lines if any(mark in line for mark in TELLING)]
        return (telling or lines or [f"exit status {self._process.returncode}"])[-1]
