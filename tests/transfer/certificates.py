"""Certificates for the tests, made with the openssl command."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from services.store.transfer.tls import Files, Tls

CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)


@dataclass(frozen=True)
class Authority:
    """One of its own in ``folder``."""

    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def issue(self, name: str, days: int = 2) -> Files:
        """A certificate for an agent; ``days`` < 0: one that has expired."""
        key, request, cert = (self.folder / f"{name}.{end}" for end in ("key", "csr", "pem"))
        _openssl("req", "-new", *CURVE, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        signing = ("-CA", self.ca, "-CAkey", self.folder / "ca.key", "-CAcreateserial")
        _openssl("x509", "-req", "-in", request, "-out", cert, *signing, "-days", str(days))
        return Files(str(cert), str(key), str(self.ca))


def authority(folder: Path) -> Authority:
    made = Authority(folder)
    _openssl(
        "req",
        "-x509",
        *CURVE,
        "-keyout",
        folder / "ca.key",
        "-out",
        made.ca,
        "-subj",
        f"/CN=authority of {folder.name}",
        "-days",
        "2",
    )
    return made


def tls(folder: Path) -> Tls:
    """What an agent of a mesh of its own has."""
    return Tls(authority(folder).issue("agent"))
