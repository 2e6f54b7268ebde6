"""Every answer of a teacher server is held to the checksum of the request and of itself."""

import logging
import random

import pytest
import torch
from crafted_requests import flipping
from served import HTTP, expected_hidden, question
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from distill.core.errors import TeacherUnavailableError
from distill.serving.open import running
from distill.teachers.backends.served.client import ServerConfig, Servers
from distill.teachers.backends.served.integrity import CHECKSUM, checksum
from distill.teachers.backends.served.protocol import Identity, tensors_of

PATH = "/v1/targets?deterministic=1"


def asked(servers, query):
    return tensors_of(servers.fetch("POST", PATH, query.body()))["hidden"]


def test_every_answer_bears_a_checksum_of_request_and_answer(url):
    query = question(1)
    for path in ("/v1/identity", "/v1/files", "/v1/head"):
        answer = HTTP.get(url + path)
        assert answer.headers[CHECKSUM] == checksum(path, b"", [answer.content])
    answer = HTTP.post(url + PATH, content=query.body())
    parts = [answer.content[:100], answer.content[100:]]
    assert answer.headers[CHECKSUM] == checksum(PATH, query.body(), parts)
    others = [
        checksum(PATH, question(2).body(), parts),
        checksum("/v1/targets", query.body(), parts),
        checksum(PATH, query.body(), parts[::-1]),
        checksum(PATH, query.body() + parts[0], parts[1:]),
    ]
    assert answer.headers[CHECKSUM] not in others
    refused = HTTP.post(url + PATH, content=b"?")
    assert refused.status_code == 400 and refused.headers[CHECKSUM] == checksum(PATH, b"?", [refused.content])


def test_a_damaged_response_is_requested_again_on_a_new_connection(url, engine, caplog):
    query, answers, connected = question(3), [], set()

    def wrong_at_first(headers, content):
        answers.append(content)
        return headers | ({CHECKSUM: "0" * 32} if len(answers) in (2, 5, 6) else {}), content

    with running(proxy(url, wrong_at_first, connected)) as address:
        servers = Servers(ServerConfig((address,), wait=20.0))
        expected = expected_hidden(engine, query)
        assert torch.equal(asked(servers, query), expected) and len(connected) == 1
        with caplog.at_level(logging.WARNING):
            assert torch.equal(asked(servers, query), expected) and len(connected) == 2  # the second and third answer
        assert "requesting it once more on a new connection" in caplog.text
        assert torch.equal(asked(servers, query), expected)
        told = "a damaged response, or one to another request: expected the checksum 0"
        with pytest.raises(TeacherUnavailableError, match=f"teacher.url: {address}: twice in a row {told}") as gone:
            asked(servers, query)
        assert "\n" not in str(gone.value)
        servers.close()


def proxy(url, change, connected=None):
    """A proxy that hands on what `change` makes of an answer's headers and body; `connected` takes clients' ports."""

    async def pass_on(request):
        if connected is not None:
            connected.add(request.client.port)
        body = await request.body()
        target = f"{url}{request.url.path}?{request.url.query}".rstrip("?")
        answer = await run_in_threadpool(lambda: HTTP.request(request.method, target, content=body))
        headers, content = change(dict(answer.headers), answer.content)
        return Response(content, answer.status_code, {n: v for n, v in headers.items() if n != "content-length"})

    return Starlette(routes=[Route("/{path:path}", pass_on, methods=["GET", "POST"])])


def test_an_answer_of_the_same_shape_to_another_question_is_not_taken(url, engine):
    """A proxy mixes up responses: every response is the first one."""
    first = []

    def change(headers, content):
        first.append((headers, content))
        return first[0]

    with running(proxy(url, change)) as address:
        servers = Servers(ServerConfig((address,), wait=5.0))
        assert torch.equal(asked(servers, question(4)), expected_hidden(engine, question(4)))
        with pytest.raises(TeacherUnavailableError, match="a damaged response, or one to another request"):
            asked(servers, question(5))
        servers.close()


@pytest.mark.full
def test_a_flipped_bit_anywhere_is_never_taken(url, engine):
    """A flipped bit in request or response, headers or body, gives the right response or an error that ends the run."""
    query, generator = question(6, rows=4, length=32), random.Random(6)
    expected, right, ended = expected_hidden(engine, query), 0, 0
    with flipping(int(url.rpartition(":")[2]), generator) as (port, count):
        while count[0] < 60:
            servers = Servers(ServerConfig((f"http://127.0.0.1:{port}",), wait=1.0))
            before = count[0]
            try:
                assert torch.equal(asked(servers, query), expected)
                right += count[0] > before
            except TeacherUnavailableError as gone:
                assert "\n" not in str(gone)
                ended += 1
            finally:
                servers.close()
    assert right > 5, (right, ended)


def test_an_older_server_is_a_one_line_error(url, engine):
    def without_sums(headers, content):
        return {name: value for name, value in headers.items() if name != CHECKSUM}, content

    with running(proxy(url, without_sums)) as address:
        servers = Servers(ServerConfig((address,), wait=5.0))
        with pytest.raises(
            TeacherUnavailableError, match="without a checksum: install the same version of distill on both sides"
        ):
            servers.identity()
        servers.close()
    older = engine.identity.written() | {"protocol": 1}
    with pytest.raises(ValueError, match=r"expected an identity of protocol 3, got 1; install the same version"):
        Identity.read(older)
    assert engine.identity._replace(protocol=7).hash == engine.identity.hash, "a run is resumed after an update"


def test_other_kinds_of_server_bear_no_sums():
    async def models(request):
        return JSONResponse({"data": []})

    with running(Starlette(routes=[Route("/v1/models", models)])) as address:
        servers = Servers(ServerConfig((address,), wait=5.0, sums=False))
        assert servers.ask("GET", "/v1/models") == b'{"data":[]}'
        servers.close()
