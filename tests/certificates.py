"""Certificates for tests: any names, any dates, self-signed or signed by an authority of their own."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import Any

import pytest

DAY = datetime.timedelta(days=1)


def certificate(
    folder: Path,
    *names: str,
    days: tuple[float, float] = (-1, 100),
    signer: tuple[Any, Any] | None = None,
    stem: str = "certificate",
) -> tuple[str, str]:
    """Paths of a certificate and its key. `days` is from when until when it is valid, counted from now."""
    written, _ = authority(folder, *names, days=days, signer=signer, stem=stem)
    return written


def authority(
    folder: Path,
    *names: str,
    days: tuple[float, float] = (-1, 100),
    signer: tuple[Any, Any] | None = None,
    stem: str = "authority",
) -> tuple[tuple[str, str], tuple[Any, Any]]:
    """The same, with what is needed to sign others."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, stem)])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).public_key(key.public_key())
    builder = builder.issuer_name(signer[0].subject if signer else subject).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now + days[0] * DAY).not_valid_after(now + days[1] * DAY)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName([_general(x509, name) for name in names]), False)
    if signer is None:
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
    made = builder.sign(signer[1] if signer else key, hashes.SHA256())
    pem, secret = folder / f"{stem}.pem", folder / f"{stem}.key"
    pem.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    secret.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    return (str(pem), str(secret)), (made, key)


def _general(x509: Any, name: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
