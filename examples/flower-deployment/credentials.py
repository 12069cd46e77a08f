"""Throw-away certificates and SuperNode keys in the formats that Flower wants."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

Key = ec.EllipticCurvePrivateKey
AUTHORITY = "loopback CA"


def new_key() -> Key:
    return ec.generate_private_key(ec.SECP384R1())


def write_private(path: Path, key: Key, form: serialization.PrivateFormat) -> None:
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))


def key_usage(*, is_authority: bool) -> x509.KeyUsage:
    """What a key may be used for. Without it an authority is refused by Python 3.13, whose verification is strict."""
    return x509.KeyUsage(
        digital_signature=not is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )


def certificate(name: str, key: Key, signer: Key, *, expired: bool = False) -> bytes:
    """A certificate of a day, today or yesterday, by the authority: itself if the key signs itself, else loopback's."""
    now = datetime.datetime.now(datetime.UTC)
    end = now - datetime.timedelta(hours=1) if expired else now + datetime.timedelta(days=1)
    is_authority = key is signer
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, AUTHORITY)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(end - datetime.timedelta(days=1, minutes=5))
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(key_usage(is_authority=is_authority), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if is_authority:
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    else:
        hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        serves = x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH])
        builder = builder.add_extension(serves, critical=False)
    return builder.sign(signer, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)


def make_certificates(folder: Path) -> None:
    """ca.pem, server.pem with server.key, both again but expired, and wrong-ca.pem, which signed nothing."""
    authority, wrong, server = new_key(), new_key(), new_key()
    (folder / "ca.pem").write_bytes(certificate(AUTHORITY, authority, authority))
    (folder / "expired-ca.pem").write_bytes(certificate(AUTHORITY, authority, authority, expired=True))
    (folder / "wrong-ca.pem").write_bytes(certificate(AUTHORITY, wrong, wrong))
    (folder / "server.pem").write_bytes(certificate("localhost", server, authority))
    (folder / "expired-server.pem").write_bytes(certificate("localhost", server, authority, expired=True))
    write_private(folder / "server.key", server, serialization.PrivateFormat.PKCS8)


def make_node_key(path: Path) -> None:
    """A key pair at path and path.pub, as `ssh-keygen -t ecdsa -b 384` makes it."""
    key = new_key()
    write_private(path, key, serialization.PrivateFormat.OpenSSH)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public + b"\n")
