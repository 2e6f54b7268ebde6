"""TLS and addresses of a teacher server: mistakes are named before weights are read, handshakes are bounded."""

import contextlib
import socket
import subprocess
import time

import pytest
import torch
from forked import free_port
from served import expected_hidden, post, question, serving
from test_serve_attacks import connect, is_closed, own_ends

from distill.cli import run_command
from distill.core.errors import TeacherUnavailableError
from distill.serving import connections
from distill.serving.connections import Timeouts, listen
from distill.serving.open import require_certificate
from distill.teachers.backends.served.client import ServerConfig, Servers
from distill.teachers.backends.served.protocol import tensors_of


def one_line(capsys, *words):
    assert run_command(["serve", "quickstart", *words]) == 2
    printed = capsys.readouterr()
    line = (printed.out + printed.err).strip()
    assert "Traceback" not in line and "broke" not in line
    return " ".join(line.split())


def test_a_port_that_is_taken_is_named_before_anything_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"--port: {port} of 127.0.0.1 is in use" in one_line(capsys, "--port", str(port))


def test_an_address_that_is_none_of_this_machines():
    with pytest.raises(ValueError, match=r"--host: expected an address of this machine, got 192\.0\.2\.1"):
        listen("192.0.2.1", free_port())
    with pytest.raises(ValueError, match="--host: expected a name or an address"):
        listen("no such host", free_port())
    for listener in listen("127.0.0.1", 0):
        listener.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed one and its key; another key."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("one", "other"):
        subprocess.run(
            [
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "rsa:2048",
                "-nodes",
                "-days",
                "2",
                "-subj",
                "/CN=localhost",
                "-addext",
                "subjectAltName=IP:127.0.0.1",
                "-keyout",
                folder / f"{name}.key",
                "-out",
                folder / f"{name}.pem",
            ],
            check=True,
            capture_output=True,
            timeout=60,
        )
    subprocess.run(
        [
            "openssl",
            "rsa",
            "-aes256",
            "-passout",
            "pass:secret",
            "-in",
            folder / "one.key",
            "-out",
            folder / "locked.key",
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return folder


def test_tls_files_are_looked_at_before_anything_is_loaded(certificate, capsys, tmp_path):
    def told(pem, key):
        return one_line(capsys, "--ssl-certfile", str(pem), "--ssl-keyfile", str(key))

    pem, key = certificate / "one.pem", certificate / "one.key"
    assert f"--ssl-certfile: {tmp_path}/none cannot be read: No such file" in told(tmp_path / "none", key)
    assert "--ssl-keyfile: " in (line := told(pem, tmp_path / "none")) and "No such file" in line
    assert "--ssl-certfile: expected a PEM certificate and its key" in told(pem, certificate / "other.key")
    assert "--ssl-certfile: expected a PEM certificate and its key" in told(key, key)
    assert "--ssl-keyfile: expected a key without a passphrase" in told(pem, certificate / "locked.key")


@pytest.mark.full
def test_a_client_verifies_the_certificate(engine, certificate, monkeypatch):
    """With the machine's authorities, or those of SSL_CERT_FILE."""
    tls = require_certificate(certificate / "one.pem", certificate / "one.key")
    with serving(engine, tls=tls) as url:
        for trusted in ("one.pem", "other.pem"):
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate / trusted))
            servers = Servers(ServerConfig((url,), wait=1.0))
            if trusted == "one.pem":
                assert servers.identity().hash == engine.identity.hash
            else:
                with pytest.raises(TeacherUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
                    servers.identity()
            servers.close()


@pytest.mark.full
def test_tls_handshakes_count_and_have_a_time_limit(engine, certificate, limit):
    limit.setattr(connections, "MOST_OPEN", 128)
    tls = require_certificate(certificate / "one.pem", certificate / "one.key")
    with serving(engine, timeouts=Timeouts(headers=2.0), tls=tls) as url, contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(connect(url)) for _ in range(300)]
        for connection in crowd[::2]:
            with contextlib.suppress(OSError):
                connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00")  # a handshake that goes no further
        query = question(3)
        assert torch.equal(
            tensors_of(post(url, query, deterministic=1).content)["hidden"], expected_hidden(engine, query)
        )
        assert len(own_ends(url)) <= 130
        assert is_closed(crowd[-1], 8) and is_closed(crowd[-2], 8)
        began = time.monotonic()
    assert time.monotonic() - began < 20, "an idle client that keeps its connection was waited for"
