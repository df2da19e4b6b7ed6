"""A certificate for one run of a mesh: made by the openssl command, in memory files that are gone with this process."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Self

from shared.errors import ConfigError

CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
SUBJECT = "/CN=mooncake mesh"
DAYS = 3650
"""Longer than any run: an agent that starts again must still be let in."""
BEGIN = b"-----BEGIN CERTIFICATE-----"
TIMEOUT = 60.0


class Certificate:
    """Signed by itself, so it is also the authority: who shows it has its key. ``cert`` and ``key`` are paths of PEM
    files, for this user's processes on this machine, until :meth:`close`: no file is left, whatever ends us."""

    def __init__(self, cert: bytes, key: bytes) -> None:
        self._files = [_memory("cert", cert), _memory("key", key)]
        self.cert, self.key = (f"/proc/{os.getpid()}/fd/{fd}" for fd in self._files)

    @classmethod
    def make(cls) -> Self:
        """Raises ConfigError where there is no openssl, or it makes none."""
        command = shutil.which("openssl")
        if command is None:
            raise ConfigError(
                "--data-tls: there is no openssl command to make a certificate with; name files with --data-tls-cert, "
                "--data-tls-key and --data-tls-ca",
                field="data_tls",
            )
        argv = [command, "req", "-x509", *CURVE, "-keyout", "-", "-out", "-", "-days", str(DAYS), "-subj", SUBJECT]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT, check=False)
        key, begin, cert = done.stdout.partition(BEGIN)
        if done.returncode or not begin:
            said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
            raise ConfigError(f"--data-tls: openssl made no certificate: {said[-1]}", field="data_tls")
        return cls(begin + cert, key)

    def close(self) -> None:
        """Idempotent."""
        for fd in self._files:
            os.close(fd)
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _memory(name: str, content: bytes) -> int:
    fd = os.memfd_create(f"mooncake-tls-{name}")
    os.fchmod(fd, 0o600)
    os.write(fd, content)
    return fd
