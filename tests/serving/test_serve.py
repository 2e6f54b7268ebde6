"""`distill serve`: what it answers, to whom, and that nobody's misuse costs anybody else."""

import contextlib
import json
import socket

import httpx2
import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from served import HTTP, engine_in, expected_hidden, post, question, recipe_in, serving, write_models
from tiny import tiny_model, tiny_tokenizer

from distill.cli import run_command
from distill.objectives.row_packing import unpack_ids
from distill.objectives.top_k_encoding import Encoding, encode
from distill.serving import engine as engine_file
from distill.serving.engine import RequestOptions, RowsRequest, ServingEngine
from distill.serving.open import is_loopback, read_token, recipe_of_model, require_safe
from distill.teachers.backends.served.protocol import (
    BINARY,
    TEACHER,
    Identity,
    ProtocolError,
    TargetRequest,
    documents,
    head_hash,
    hidden_of,
    packed_rows,
    parts_of,
    read_body,
    tensors_of,
)

TOKEN = "a-token-of-more-than-sixteen"


# ------------------------------------------------------------------ what it says


@pytest.mark.parametrize("packed", [True, False])
def test_a_single_served_row_equals_the_model_bitwise(engine, url, packed):
    query = question(1, packed=packed)
    answer = post(url, query, deterministic=1)
    assert answer.status_code == 200 and answer.headers[TEACHER] == engine.identity.hash
    assert torch.equal(tensors_of(answer.content)["hidden"], expected_hidden(engine, query))


def test_several_are_packed_into_one_forward(engine):
    query = [question(seed, rows=1 + seed % 3, length=12 + 5 * (seed % 4), packed=seed % 2 == 0) for seed in range(7)]
    before, shapes = engine.forward, []

    def seen(batch):
        shapes.append(tuple(batch["input_ids"].shape))
        return before(batch)

    engine.forward = seen
    try:
        answers = engine.answer([RowsRequest(each, RequestOptions().checked(259)) for each in query])
    finally:
        engine.forward = before
    assert len(shapes) == 1
    needed = sum(len(piece.ids) for each in query for piece in documents(each))
    assert np.prod(shapes[0]) < 1.25 * needed < sum(each.ids.size for each in query) * 1.25
    for each, answer in zip(query, answers, strict=True):
        alone = expected_hidden(engine, each)  # from which attention's order of adding up differs, and nothing else
        assert (answer["hidden"] - alone).norm() < 1e-6 * alone.norm()


def test_a_model_that_mixes_documents_gets_one_a_row(engine, monkeypatch):
    monkeypatch.setattr(engine, "packs", False)
    query = question(3)
    (answer,) = engine.answer([RowsRequest(query, RequestOptions().checked(259))])
    torch.testing.assert_close(answer["hidden"], expected_hidden(engine, query), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tail", ["bucket", "sampled"])
def test_top_k_is_what_a_cache_stores(engine, url, tail):
    query = question(2)
    answers = [
        tensors_of(post(url, query, top_k=8, columns=200, tail=tail, temperature=2, deterministic=1).content)
        for _ in range(2)
    ]
    assert all(torch.equal(answers[0][name], answers[1][name]) for name in answers[0])  # drawn by what is asked
    hidden, labels = expected_hidden(engine, query), torch.from_numpy(query.labels).long().clamp_max(199)
    encoding = Encoding(200, 8, tail, 2.0)
    stored = encode(hidden, engine.weights, engine.transform, labels, encoding).to(torch.float16)
    assert torch.equal(answers[0]["entropy"], stored.entropy)
    assert torch.equal(answers[0]["label_logprob"], stored.label_logprob)
    if tail == "bucket":
        assert torch.equal(unpack_ids(answers[0], 200), stored.ids) and torch.equal(answers[0]["tail"], stored.tail)
    sizes = {name: tensor.nbytes / len(query.rows) for name, tensor in answers[0].items()}
    assert sum(sizes.values()) == 8 * 4 + 3 * 2


def test_what_travels_is_safetensors_read_and_written_without_a_copy():
    dtypes = [torch.uint8, torch.bfloat16, torch.float32, torch.uint16, torch.int64, torch.float8_e4m3fn, torch.bool]
    tensors = {str(d): torch.arange(15).reshape(5, 3).to(d) for d in dtypes} | {
        "none": torch.empty(0, 7),
        "": torch.tensor(3.0),
        "stride 0": torch.as_strided(torch.tensor([5, 6]), (1,), (0,), 1),
    }
    body = b"".join(parts_of(tensors))
    for read in (tensors_of(body), load(body)):
        assert read.keys() == tensors.keys()
        assert all(read[n].dtype == t.dtype and torch.equal(read[n].view(t.shape), t) for n, t in tensors.items())
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in tensors_of(save(tensors)).items())
    memory = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    first, last = memory.data_ptr(), memory.data_ptr() + len(memory)
    assert all(first <= tensor.data_ptr() < last for tensor in tensors_of(memory).values() if tensor.numel())
    (_, part) = parts_of({"x": tensors["torch.float32"]})
    tensors["torch.float32"][0, 0] = 77
    assert bytes(part)[:4] == np.float32(77).tobytes()


def test_the_error_of_fp8_transfer_is_that_of_the_identity(engine, url):
    query = question(4)
    answer = tensors_of(post(url, query, dtype="fp8", deterministic=1).content)
    plain = expected_hidden(engine, query)
    assert answer["hidden"].dtype == torch.float8_e4m3fn and sum(t.nbytes for t in answer.values()) == len(plain) * 68
    sent = hidden_of(answer, torch.float32)
    assert 1e-3 < float((sent - plain).norm() / plain.norm()) < 0.04
    logp, logq = ((h @ engine.weights.weight.T).log_softmax(-1) for h in (plain, sent))
    cost = float((logp.exp() * (logp - logq)).sum(-1).mean())
    assert 0.2 < cost / engine.identity.notes["fp8_kl"] < 5
    zeros = packed_rows(torch.zeros(2, 8), "fp8")
    assert torch.equal(hidden_of(zeros, torch.float32), torch.zeros(2, 8))


def test_served_logits_equal_those_of_the_model(engine, url):
    query = question(5)
    answer = tensors_of(post(url, query, "/v1/logits").content)["logits"]
    batch = {
        name: torch.from_numpy(a).long() for name, a in (("input_ids", query.ids), ("position_ids", query.positions))
    }
    with torch.no_grad():
        logits = engine.model(**batch, use_cache=False).logits.flatten(0, 1)
    assert torch.equal(answer, logits[torch.from_numpy(query.rows).long()])


def test_for_people_there_is_json(url):
    query = question(6, rows=1, packed=False)
    body = {"input_ids": query.ids.tolist(), "rows": query.rows.tolist()}
    binary = tensors_of(post(url, query, deterministic=1, top_k=3, dtype="float32").content)
    plain = HTTP.post(f"{url}/v1/targets?deterministic=1&top_k=3&dtype=float32", json=body).json()
    np.testing.assert_allclose(plain["logprobs"], binary["logprobs"].numpy(), rtol=1e-6)
    assert plain["ids"] == binary["ids"].tolist()


def test_who_it_is_and_its_head_once(engine, url):
    identity = Identity.read(HTTP.get(f"{url}/v1/identity").json())
    assert identity.hash == engine.identity.hash and identity.hidden == 64 and identity.softcap is None
    head = HTTP.get(f"{url}/v1/head")
    assert head_hash(tensors_of(head.content)) == identity.head
    again = HTTP.get(f"{url}/v1/head", headers={"if-none-match": head.headers["etag"]})
    assert again.status_code == 304 and not again.content
    files = HTTP.get(f"{url}/v1/files").json()
    assert json.loads(files["config.json"])["hidden_size"] == 64 and "tokenizer.json" in files
    assert HTTP.get(f"{url}/health").json()["status"] == "ok"
    with pytest.raises(ProtocolError, match="hash is its own"):
        Identity.read(engine.identity.written() | {"softcap": 30.0})


# ------------------------------------------------------------------ who may not, and what is not


def test_garbage_is_refused_in_one_line(url):
    good = question(7)
    bodies = {
        b"": 400,
        b"\x00" * 64: 400,
        b"{" * 100: 400,
        b"\xff\xff\xff\xff\xff\xff\xff\x7f{}": 400,
        good.body()[:-9]: 400,
        good.body() + b"x": 400,
    }
    for body, status in bodies.items():
        answer = HTTP.post(f"{url}/v1/targets", content=body)
        assert answer.status_code == status and "\n" not in answer.json()["error"], (body[:20], answer.text)
    texts = {
        "[]": 422,
        "{}": 422,
        "[1]": 400,
        "nonsense": 400,
        '{"input_ids": [[1, 2], [3]], "rows": []}': 400,
        '{"input_ids": [[1.5]], "rows": []}': 422,
        '{"input_ids": [[1, 2]], "rows": [0], "path": [1]}': 422,
        '{"input_ids": "/etc/passwd", "rows": [0]}': 422,
        "[" * 100_000: 400,
        '{"input_ids": [[1e99, 2]], "rows": [0]}': 422,
        '{"input_ids": [[99999999999999999999, 2]], "rows": [0]}': 422,
    }
    for text, status in texts.items():
        answer = HTTP.post(f"{url}/v1/targets", content=text, headers={"content-type": "application/json"})
        assert answer.status_code == status and answer.json()["error"], (text[:40], answer.text)
    meant = [
        (TargetRequest(good.ids + 300, good.positions, good.rows), "input_ids: expected 0 to 258"),
        (TargetRequest(good.ids, good.positions + 1, good.rows), "position_ids: expected each to be 0"),
        (TargetRequest(good.ids, good.positions[:, :-1].copy(), good.rows), "position_ids: expected"),
        (TargetRequest(good.ids, good.positions, good.rows[::-1].copy()), "rows: expected ascending"),
        (TargetRequest(good.ids, good.positions, np.array([9], np.int32)), "rows: a document's last token"),
        (TargetRequest(good.ids, good.positions, np.array([39], np.int32)), "rows: expected ascending"),
        (TargetRequest(good.ids, good.positions, np.array([-1, 2], np.int32)), "rows: expected ascending"),
        (TargetRequest(np.ones((1, 600), np.int32), None, np.array([0], np.int32)), "a document of 600; at most 512"),
        (TargetRequest(np.ones((20, 400), np.int32), None, np.array([0], np.int32)), "expected 1 to 4096 tokens"),
    ]
    for query, told in meant:
        answer = post(url, query)
        assert answer.status_code == 422 and told in answer.json()["error"], answer.text
    for options, told in (
        ({"top_k": 512}, "top_k"),
        ({"top_k": "x"}, "top_k"),
        ({"columns": 300}, "columns"),
        ({"dtype": "int3"}, "dtype"),
        ({"top_k": 3, "tail": "none"}, "tail"),
        ({"temperature": "nan"}, "temperature"),
        ({"file": "/x"}, "options: expected"),
    ):
        answer = post(url, good, **options)
        assert answer.status_code == 422 and told in answer.json()["error"], answer.text
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=10) as connection:
        connection.sendall(b"POST /v1/targets HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 300000\r\n\r\nabc")
        assert b" 413 " in connection.recv(100)
    with contextlib.suppress(httpx2.TransportError):  # it hangs up on one that never ends
        assert HTTP.post(f"{url}/v1/targets", content=(b"x" * 65_536 for _ in range(16))).status_code == 413
    assert HTTP.get(f"{url}/v1/targets").status_code == 405 and HTTP.get(f"{url}/../etc").status_code == 404
    assert post(url, good).status_code == 200


def test_any_bytes_are_a_request_or_a_wire_error():
    generator, good = np.random.default_rng(0), question(8).body()
    for _ in range(300):
        body = bytearray(good)
        for at in generator.integers(0, len(body), 3):
            body[at] = generator.integers(0, 256)
        for as_json in (False, True):
            try:
                query = read_body(bytes(body), as_json).checked(259, 4096, 512)
            except ProtocolError as error:
                assert "\n" not in str(error)[:100]
            else:
                assert query.ids.max() < 259


def test_a_server_requires_its_token(engine):
    query = question(9)
    with serving(engine, TOKEN) as url:
        for path in ("identity", "head", "files"):
            assert HTTP.get(f"{url}/v1/{path}").status_code == 401
        for given in ("", "Bearer", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}x", f"Basic {TOKEN}"):
            answer = HTTP.post(f"{url}/v1/targets", content=query.body(), headers={"authorization": given})
            assert answer.status_code == 401 and TOKEN not in answer.text
        assert HTTP.get(f"{url}/health").status_code == 200
        right = HTTP.post(f"{url}/v1/targets", content=query.body(), headers={"authorization": f"Bearer {TOKEN}"})
        assert right.status_code == 200


def test_without_a_token_it_stays_on_loopback(url, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("DISTILL_SERVE_TOKEN", raising=False)
    assert [is_loopback(h) for h in ("127.0.0.1", "localhost", "::1", "127.8.8.8")] == [True] * 4
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "127.0.0.1.nip.io")))
    assert run_command(["serve", "quickstart", "--host", "0.0.0.0"]) == 2
    assert "needs a token" in capsys.readouterr().err
    # a page in a browser of this machine asks by another name
    assert HTTP.get(f"{url}/v1/identity", headers={"host": "evil.example"}).status_code == 400
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    assert read_token(path) == TOKEN and read_token(None) is None
    require_safe("0.0.0.0", TOKEN)
    path.write_text("short")
    with pytest.raises(ValueError, match="at least 16"):
        read_token(path)
    monkeypatch.setenv("DISTILL_SERVE_TOKEN", TOKEN * 2)
    assert read_token(None) == TOKEN * 2


def test_what_cannot_be_served(place, capsys):
    for overrides, told in (
        (["teacher={type: server, url: 'http://127.0.0.1:1'}"], "got teacher.type: server"),
        (["teacher={type: cache, path: there}"], "got teacher.type: cache"),
        (["teacher=null", "teachers=[{model: t}, {model: u}]"], "requires one teacher; got teachers"),
    ):
        with pytest.raises(ValueError, match=told):
            engine_in(place, *overrides)
    assert run_command(["serve", str(place / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert run_command(["serve", "quickstart", "--address-file", str(place / "no/address")]) == 2
    assert "--address-file: expected a file in an existing folder" in capsys.readouterr().err
    assert run_command(["serve", "quickstart", "--ssl-certfile", "x"]) == 2
    recipe = recipe_of_model("some/model", ["teacher.dtype=float32"])
    assert recipe.teacher.model == "some/model" and recipe.teacher.dtype == "float32"


def test_a_servers_identity_has_scale_and_soft_cap(tmp_path):
    write_models(tmp_path, kind="gemma2", final_logit_softcapping=5.0)
    engine = engine_in(tmp_path)
    assert engine.identity.softcap == 5.0 and engine.identity.scale == 1.0
    assert recipe_in(tmp_path).teacher.model


def test_media_types_and_an_engine_without_a_tokenizer():
    from distill.recipe import LocalTeacherConfig
    from distill.teachers.backends.local import LoadedTeacher

    model = tiny_model(tiny_tokenizer(), seed=3)
    engine = ServingEngine(LoadedTeacher(model), LocalTeacherConfig(init="random", config="x"), None, None, 64)
    assert engine.files.keys() == {"config.json"} and engine.identity.tokenizer is None
    assert engine_file.FILES and BINARY == "application/octet-stream"
