"""https:// as an endpoint: bodies arrive whole with either check of them, and what is wrong with a certificate is said, not retried.

Over TLS botocore signs and sends bodies in another way than over plain http, which the other tests use.
"""

import datetime
import ipaddress

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from publications import contents, make_head
from s3_servers import rclone_server

from jobs.errors import MustFix
from jobs.settings import PushSettings
from jobs.storage.bucket import probe, publish, pull


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """(certificate, key) of 127.0.0.1, signed by itself."""
    folder, key = tmp_path_factory.mktemp("tls"), ec.generate_private_key(ec.SECP256R1())
    name, now = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "loopback")]), datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
    signed = builder.sign(key, hashes.SHA256())
    (folder / "certificate.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, *plain))
    return folder / "certificate.pem", folder / "key.pem"


@pytest.fixture(scope="module")
def endpoint(certificate, tmp_path_factory):
    """(URL, environment) of rclone's server behind that certificate, with a bucket."""
    folder = tmp_path_factory.mktemp("rclone")
    (folder / "heads").mkdir()
    with rclone_server(folder, "--cert", str(certificate[0]), "--key", str(certificate[1])) as server:
        yield server.endpoint_url.replace("http:", "https:"), server.environment


@pytest.fixture
def settings(endpoint, monkeypatch):
    for name, value in endpoint[1].items():
        monkeypatch.setenv(name, value)
    return PushSettings(endpoint_url=endpoint[0], path_style=True, part_mib=5, threads=2)


@pytest.mark.parametrize("checksums", ["when_required", "when_supported"])
def test_a_head_arrives_over_tls(settings, certificate, monkeypatch, tmp_path, checksums):
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate[0]))
    checked = settings.model_copy(update={"checksums": checksums})
    head = make_head(tmp_path / "head", 1)
    probe("s3://heads/x", checked)
    publish(head, f"s3://heads/{checksums}", checked, state=None)
    pull(f"s3://heads/{checksums}", tmp_path / "back", checked)
    assert contents(tmp_path / "back") == contents(head)


def test_a_certificate_that_nobody_here_vouches_for(settings):
    with pytest.raises(MustFix, match="certificate is not trusted here: .*set AWS_CA_BUNDLE to a file") as refusal:
        probe("s3://heads/x", settings)
    assert "\n" not in str(refusal.value)


def test_https_to_a_server_without_tls(rclone, settings):
    plain = settings.model_copy(update={"endpoint_url": rclone.endpoint_url.replace("http:", "https:")})
    with pytest.raises(MustFix, match="The endpoint speaks no TLS .*http:// instead of https://"):
        probe("s3://heads/x", plain)
