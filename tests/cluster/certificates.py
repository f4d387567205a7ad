"""Certificates for tests, made by openssl: an authority, and certificates of 127.0.0.1 that it has
signed.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

_NEW = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"


def _made(folder: Path, words: str) -> None:
    try:
        subprocess.run(words.split(), cwd=folder, check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("there is no openssl here to make a certificate")


def authority(folder: Path) -> Path:
    """A folder with ca.pem."""
    _made(folder, f"{_NEW} -subj /CN=authority -keyout ca.key -out ca.pem")
    return folder


def signed(folder: Path, name: str) -> tuple[str, str]:
    """A certificate of this common name, for servers and clients: its file and its key's."""
    _made(
        folder,
        f"{_NEW} -CA ca.pem -CAkey ca.key -subj /CN={name} -addext subjectAltName=IP:127.0.0.1 "
        f"-addext basicConstraints=critical,CA:false -keyout {name}.key -out {name}.pem",
    )
    return str(folder / f"{name}.pem"), str(folder / f"{name}.key")
