"""The certificate that ``mooncake up --data-tls`` makes, and what is said where it cannot."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.certificates import Certificate
from cli.main import main
from cli.supervisor import WRONG_SETTING
from services.store.transfer.tls import Files, Tls
from shared.errors import ConfigError


def test_it_is_certificate_and_authority_and_gone_with_its_owner() -> None:
    with Certificate.make() as made:
        Tls(Files(made.cert, made.key, made.cert))
        assert os.stat(made.key).st_mode & 0o777 == 0o600
        der = ssl.PEM_cert_to_DER_cert(Path(made.cert).read_text())
        with Certificate.make() as other:
            assert ssl.PEM_cert_to_DER_cert(Path(other.cert).read_text()) != der
    made.close()
    assert not os.path.exists(made.cert) and not os.path.exists(made.key)


@pytest.mark.parametrize(
    "said", ["", "echo 'no entropy left' >&2; exit 3", "exit 0"], ids=["absent", "fails", "silent"]
)
def test_without_a_working_openssl_it_says_what_to_do(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if said:
        (tmp_path / "openssl").write_text(f"#!/bin/sh\n{said}\n")
        (tmp_path / "openssl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="--data-tls") as wrong:
        Certificate.make()
    assert wrong.value.field == "data_tls"
    assert ("no entropy left" if "entropy" in said else "openssl") in wrong.value.message


def test_a_file_that_cannot_be_read_is_named_before_anything_starts(tmp_path: Path) -> None:
    there = tmp_path / "there.pem"
    there.write_text("x")
    argv = ["--data-tls-cert", str(there), "--data-tls-key", str(tmp_path / "none.pem"), "--data-tls-ca", str(there)]
    done = CliRunner().invoke(main, ["up", "--port", "0", *argv])
    assert done.exit_code == WRONG_SETTING and "--data-tls-key" in done.output and "none.pem" in done.output
