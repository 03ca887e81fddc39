"""The files of a server's certificate: when it ends, and which file an error names."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from outbox_broker.http.server_certificate import ServerCertificate
from outbox_core.common.errors import ConfigurationError

ENDS = [dt.datetime(2031, 2, 3, 4, 5, 6, tzinfo=dt.UTC), dt.datetime(2050, 1, 1, tzinfo=dt.UTC)]
Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


def write(folder: Path, *, ends_at: dt.datetime = ENDS[0], key: Key | None = None) -> tuple[Path, Path]:
    """The files of a certificate and its key."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x" * 60)] * 4)  # longer than a byte can say
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    signed = (
        builder.not_valid_before(dt.datetime(2020, 1, 1, tzinfo=dt.UTC))
        .not_valid_after(ends_at)
        .sign(key, hashes.SHA256())
    )
    folder.mkdir(exist_ok=True)
    chain, key_file = folder / "chain.pem", folder / "key.pem"
    chain.write_bytes("# Ärzte\n".encode() + signed.public_bytes(Encoding.PEM))
    key_file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return chain, key_file


@pytest.mark.parametrize("ends_at", ENDS, ids=["UTCTime", "GeneralizedTime"])
def test_the_end_of_the_first_certificate_is_known(tmp_path: Path, ends_at: dt.datetime) -> None:
    chain, key = write(tmp_path / "own", ends_at=ends_at)
    issuer, _ = write(tmp_path / "issuer", ends_at=dt.datetime(2040, 1, 1, tzinfo=dt.UTC))
    chain.write_bytes(chain.read_bytes() + issuer.read_bytes())

    assert ServerCertificate.load(chain, key).ends_at == ends_at


def test_an_error_names_the_file_to_mend(tmp_path: Path) -> None:
    chain, key = write(tmp_path / "own")
    _, other = write(tmp_path / "other")
    _, of_another_kind = write(tmp_path / "kind", key=rsa.generate_private_key(public_exponent=65537, key_size=2048))
    encrypted = tmp_path / "encrypted.pem"
    encrypted.write_bytes(
        ec.generate_private_key(ec.SECP256R1()).private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
        )
    )
    torn, none = tmp_path / "torn.pem", tmp_path / "none.pem"
    torn.write_bytes(chain.read_bytes()[:-100])

    for files, said in [
        ((none, key), f"there is no file {none}"),
        ((chain, none), f"there is no file {none}"),
        ((torn, key), f"{torn} is no certificate chain"),
        ((key, key), f"{key} is no certificate chain"),
        ((chain, chain), f"{chain} is no private key"),
        ((chain, encrypted), f"the key {encrypted} is encrypted"),
        ((chain, other), f"the key {other} is not that of the certificate {chain}"),
        ((chain, of_another_kind), f"the key {of_another_kind} is not that of the certificate {chain}"),
    ]:
        with pytest.raises(ConfigurationError) as refused:
            ServerCertificate.load(*files)
        assert said in str(refused.value)
