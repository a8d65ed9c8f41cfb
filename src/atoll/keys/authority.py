"""A certificate authority for one run, and the certificate of its syncer (the `keys` extra: cryptography)."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.errors import ConfigError
from atoll.keys.registry import CERTIFICATE_FILE, KEY_FILE, KEYS_FILE, write_keys, write_private

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

CA_FILE = "ca.pem"
CA_KEY_FILE = "ca.key"
CA_DAYS = 3650
"""The authority outlives every run; its key never leaves the operator's machine."""
DAYS_MAX = 3650
BACKDATED = timedelta(hours=1)
"""Clocks of machines differ: a certificate that is made now is good everywhere now."""


def make_authority(folder: Path, names: Sequence[str], *, days: int) -> None:
    """Make a folder with an authority, the syncer's certificate for these names and addresses, and no keys yet."""
    if any((folder / name).exists() for name in (CA_KEY_FILE, KEYS_FILE)):
        raise ConfigError(f"{folder} has keys; give another folder, or `atoll keys renew` for a new certificate")
    _library()
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    _check(names, days)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _named("atoll authority")
    builder = _builder(subject, subject, key, CA_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(sign=True), critical=True)
    made = builder.sign(key, _sha256())
    _write(folder, CA_FILE, CA_KEY_FILE, made, key)
    _certify(folder, names, days, made, key)
    write_keys(folder / KEYS_FILE, {})


def renew_certificate(folder: Path, names: Sequence[str] = (), *, days: int) -> list[str]:
    """A new certificate of the same authority, for these names or those of the old one; returns them. Learners that
    trust the authority need nothing."""
    _library()
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        signer = x509.load_pem_x509_certificate((folder / CA_FILE).read_bytes())
        key: Any = load_pem_private_key((folder / CA_KEY_FILE).read_bytes(), None)
        old = x509.load_pem_x509_certificate((folder / CERTIFICATE_FILE).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} has no authority ({error}); give the folder that `atoll keys init` made") from None
    found = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    chosen = list(names) or [str(one.value) for one in found]
    _check(chosen, days)
    _certify(folder, chosen, days, signer, key)
    return chosen


def _certify(folder: Path, names: Sequence[str], days: int, signer: x509.Certificate, signing: Any) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_named("atoll syncer"), signer.subject, key, days)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key())
    builder = builder.add_extension(issuer, critical=False)
    alternatives = x509.SubjectAlternativeName([_alternative(name) for name in names])
    builder = builder.add_extension(alternatives, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(sign=False), critical=True)
    purpose = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    builder = builder.add_extension(purpose, critical=False)
    _write(folder, CERTIFICATE_FILE, KEY_FILE, builder.sign(signing, _sha256()), key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return builder.not_valid_before(now - BACKDATED).not_valid_after(now + timedelta(days=days))


def _usage(*, sign: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not sign,
        key_cert_sign=sign,
        crl_sign=sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write(
    folder: Path, certificate_file: str, key_file: str, made: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_private(folder / key_file, private)
    write_private(folder / certificate_file, made.public_bytes(Encoding.PEM), 0o644)


def _alternative(name: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return x509.DNSName(name)
    except ValueError:
        raise ConfigError(f"{name!r} is no host name: give plain names (ASCII) and addresses with --name") from None


def _named(name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _sha256() -> Any:
    from cryptography.hazmat.primitives import hashes

    return hashes.SHA256()


def _check(names: Sequence[str], days: int) -> None:
    if not names or any((":" in name and not _is_address(name)) or "/" in name for name in names):
        raise ConfigError("give each name and address under which learners reach the syncer, without port: --name HOST")
    if not 1 <= days <= DAYS_MAX:
        raise ConfigError(f"--days is from 1 to {DAYS_MAX}, not {days}")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _library() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise ConfigError("certificates need the cryptography library: pip install 'atoll[keys]'") from None
