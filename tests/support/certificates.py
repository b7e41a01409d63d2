"""Self-signed certificates for tests, by the ``openssl`` command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def self_signed(folder: Path, host: str = "127.0.0.1") -> tuple[Path, Path]:
    """Write a certificate for an address, and its key; return their files. Skips the test without ``openssl``."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the command openssl")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subject = ["-subj", "/CN=kvferry test", "-addext", f"subjectAltName=IP:{host}"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run(
        [openssl, "req", "-x509", "-days", "1", *curve, *subject, *files], check=True, capture_output=True, timeout=60
    )
    return cert, key
