"""vLLM as a teacher, read as its documentation has it: it never ran beside the real one. And what recipes may say."""

import fcntl
import itertools
import json
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from served import from_server, opened, recipe_in, write_models
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse
from starlette.routing import Route

from distill.core.errors import RunError
from distill.data.collator import Collator
from distill.objectives.top_k import top_k_targets
from distill.objectives.top_k_encoding import Encoding, encode
from distill.planning.devices import find_device
from distill.planning.preflight import check_run
from distill.recipe import LocalTeacherConfig
from distill.run import run
from distill.serving.open import running
from distill.teachers.backends.served import vllm as vllm_client
from distill.teachers.backends.served.vllm_hidden import load_ends
from distill.training.lock_file import read_lock


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("place"), kind="gemma2", final_logit_softcapping=5.0)


def vllm(engine, most=20, shifted=False, asked=None, mode=lambda logits: logits.log_softmax(-1)):
    """A server that answers as vLLM's documentation has it; it never ran beside the real one."""

    async def models(request):
        return JSONResponse({"object": "list", "data": [{"id": "tiny", "root": "tiny", "max_model_len": 512}]})

    async def completions(request):
        query = await request.json()
        assert query["max_tokens"] == 1 and query["model"] == "tiny"
        k, choices = query["prompt_logprobs"], []
        if asked is not None:
            asked.append(query["prompt"])
        if k > most:
            text = f"Requested prompt logprobs of {k}, which is greater than max allowed: {most} (max_logprobs)"
            return JSONResponse({"error": {"message": text, "type": "BadRequestError", "code": 400}}, 400)
        for index, prompt in enumerate(query["prompt"]):
            with torch.no_grad():
                logp = engine.model(input_ids=torch.tensor([prompt])).logits[0].float()
            logp = mode(logp)
            entries = [None]
            for token, row in zip(prompt[1:], logp[:-1], strict=True):
                chosen = [token, *row.topk(k).indices.tolist()]
                entries.append(
                    {
                        str(one): {
                            "logprob": row[one].item(),
                            "rank": int((row > row[one]).sum()) + 1,
                            "decoded_token": "?",
                        }
                        for one in chosen
                    }
                )
            entries = [*entries[1:], None] if shifted else entries
            choices.append({"index": index, "text": "", "prompt_logprobs": entries, "finish_reason": "length"})
        return JSONResponse({"id": "cmpl-1", "object": "text_completion", "choices": choices[::-1]})

    return Starlette(routes=[Route("/v1/models", models), Route("/v1/completions", completions, methods=["POST"])])


def test_vllm_is_read_as_its_documentation_has_it(place, engine):
    with running(vllm(engine)) as address:
        recipe = recipe_in(place, *from_server(address, protocol="vllm", top_k=8), "loss.terms.0.type=reverse_kl")
        teacher, vocabulary = opened(recipe)
        rows = [vocabulary.read(recipe.data, 0).train[number] for number in range(3)]
        batch = Collator(2, columns=teacher.columns)(rows)
        targets = teacher.targets(batch)
        hidden = engine.forward({"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}).flatten(0, 1)
        labels = batch["input_ids"].flatten()[batch["valid_rows"] + 1]
        own = encode(hidden[batch["valid_rows"]], engine.weights, engine.transform, labels, Encoding(259, 8, "bucket"))
        expected = top_k_targets(own._asdict(), batch["valid_rows"], batch["input_ids"].shape, "bucket")
        torch.testing.assert_close(targets.logprobs, expected.logprobs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(targets.label_logprob, expected.label_logprob, rtol=1e-4, atol=1e-5)
        assert float((targets.ids == expected.ids).float().mean()) > 0.99
        assert bool((targets.entropy <= expected.entropy + 1e-4).all())
        result = run(recipe, name="vllm")
        assert (
            np.isfinite(result.after.forward_kl) and read_lock(result.folder / "lock.yaml")["teacher"]["id"] == "tiny"
        )
        with pytest.raises(RunError, match=r"teacher\.top_k: .*--max-logprobs"):
            run(recipe_in(place, *from_server(address, protocol="vllm", top_k=30)), name="vllm-30")
        with pytest.raises(ValueError, match=r"loss\.temperature: expected 1"):
            run(recipe_in(place, *from_server(address, protocol="vllm", top_k=8), "loss.temperature=2"), name="vllm-T")
    with running(vllm(engine, shifted=True)) as address, pytest.raises(RunError, match="shifted by one"):
        run(recipe_in(place, *from_server(address, protocol="vllm", top_k=8)), name="vllm-shifted")


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        (lambda logits: logits + 30.0, "expected log-probabilities, got one of "),
        (lambda logits: logits.log_softmax(-1).mul(0.2).sub(0.01), "got probabilities that sum to "),
    ],
    ids=["logits", "flat ones below 0"],
)
def test_logits_are_not_taken_for_log_probabilities(place, engine, mode, told):
    """A server started with --logprobs-mode raw_logits is reported before training."""
    with running(vllm(engine, mode=mode)) as address:
        recipe = recipe_in(place, *from_server(address, protocol="vllm", top_k=8))
        with pytest.raises(RunError, match=rf"teacher\.url: .*{told}.*--logprobs-mode raw_logprobs") as refused:
            opened(recipe)
        assert "\n" not in str(refused.value)


@pytest.mark.full
def test_documents_longer_than_a_servers_limit_are_reported_before_a_run(place, engine):
    with running(vllm(engine)) as address:
        asks = from_server(address, protocol="vllm", top_k=8)
        told = "data.max_length: expected at most 511, since vLLM was started with --max-model-len 512, got 512"
        report = check_run(recipe_in(place, *asks, "data.max_length=512"), find_device("cpu"))
        assert [problem for problem in report.problems if problem.startswith(told)], report.problems
        with pytest.raises(ValueError, match=r"data\.max_length: expected at most 511"):
            run(recipe_in(place, *asks, "data.max_length=512"), name="too-long")
        assert not check_run(recipe_in(place, *asks, "data.max_length=511"), find_device("cpu")).problems
        states = from_server(address, protocol="vllm", folder=str(place))
        for length, most in ((513, 512), (512, None)):
            problems = check_run(recipe_in(place, *states, f"data.max_length={length}"), find_device("cpu")).problems
            told = [problem for problem in problems if "--max-model-len" in problem]
            assert [f"expected at most {most}," in problem for problem in told] == [True] * (most is not None), told


def vllm_with_folder(engine, folder, change):
    """The same with the connector of its documentation, which writes a file a request under an exclusive flock."""
    plain, elsewhere = vllm(engine), Path("/where/the/server/has/it")
    counts, one_at_a_time = itertools.count(), threading.Lock()

    def states_of(prompt):
        kept = []
        with one_at_a_time, torch.no_grad():
            hook = engine.model.model.norm.register_forward_pre_hook(lambda module, given: kept.append(given[0][0]))
            engine.model.model(input_ids=torch.tensor([prompt]))
            hook.remove()
        return change("states", kept[0])

    def write(path, prompt, begun):
        with path.with_name(path.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            begun.set()
            path.write_bytes(b"not yet")
            states = states_of(prompt)
            values = {"hidden_states": torch.stack([torch.zeros_like(states), states], 1)}
            time.sleep(0.02)
            save_file(values | {"token_ids": torch.tensor(change("tokens", prompt))}, path)

    def begin(path, prompt):
        begun = threading.Event()
        threading.Thread(target=write, args=(path, prompt, begun)).start()
        begun.wait()

    async def completions(request):
        query = await request.json()
        (prompt,) = query["prompt"]
        name = f"cmpl-{next(counts)}.safetensors"
        await run_in_threadpool(begin, folder / name, prompt)
        params = {"kv_transfer_params": {"hidden_states_path": str(elsewhere / name)}}
        answer = {"id": "cmpl-1", "object": "text_completion", "choices": [{"index": 0, "text": ""}]}
        if "prompt_logprobs" in query:  # a file is written for these too
            answer = json.loads((await plain.routes[1].endpoint(request)).body)
        return JSONResponse(answer | change("answer", params))

    return Starlette(routes=[plain.routes[0], Route("/v1/completions", completions, methods=["POST"])])


@pytest.mark.full
def test_hidden_states_are_read_from_the_folder_of_its_connector(place, engine, tmp_path):
    """The stand-in follows vLLM's documentation; norm, head and soft cap are applied here."""
    with running(vllm_with_folder(engine, tmp_path, lambda what, values: values)) as address:
        recipe = recipe_in(place, *from_server(address, protocol="vllm", folder=str(tmp_path)), "loss.temperature=2")
        teacher, vocabulary = opened(recipe)
        rows = [vocabulary.read(recipe.data, 0).train[number] for number in range(3)]
        batch = Collator(2, columns=teacher.columns)(rows)
        hidden = engine.forward({"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]})
        at = batch["valid_rows"]
        targets = teacher.targets(batch).flatten(0, 1)
        torch.testing.assert_close(targets[at], hidden.flatten(0, 1)[at], rtol=1e-4, atol=1e-5)
        assert (
            torch.equal(teacher.stored_head.weights.weight, engine.weights.weight) and teacher.transform.softcap == 5.0
        )
        result = run(recipe, name="vllm-hidden")
    alone = run(recipe_in(place, "loss.temperature=2"), name="vllm-alone")
    assert result.after.forward_kl == pytest.approx(alone.after.forward_kl, rel=1e-4)
    assert read_lock(result.folder / "lock.yaml")["teacher"]["ends"] and not list(tmp_path.iterdir())


FAULTS = {
    "off by .* nats a token from the server's own": lambda n, v: v.roll(1, 0) if n == "states" else v,
    "a file of other tokens": lambda n, v: [7, *v[1:]] if n == "tokens" else v,
    "without kv_transfer_params": lambda n, v: {} if n == "answer" else v,
    "expected .tokens, layers, 64., got": lambda n, v: v[:, :8] if n == "states" else v,
}


@pytest.mark.plain("off by .* nats a token from the server's own", "without kv_transfer_params")
@pytest.mark.parametrize("told", FAULTS)
def test_errors_of_a_connectors_files_are_reported(place, engine, tmp_path, told):
    with running(vllm_with_folder(engine, tmp_path, FAULTS[told])) as address:
        recipe = recipe_in(place, *from_server(address, protocol="vllm", folder=str(tmp_path)))
        with pytest.raises((ValueError, RunError), match=rf"teacher\.folder: .*{told}"):
            run(recipe, name=tmp_path.name)
        with pytest.raises(ValueError, match=r"teacher\.folder: expected the folder"):
            opened(recipe_in(place, *from_server(address, protocol="vllm", folder=str(tmp_path / "none"))))


def test_a_server_that_dies_at_start_is_reported_at_once(place, engine, tmp_path, monkeypatch):
    """Not after `teacher.timeout`, and not that a file is missing."""
    monkeypatch.setattr(vllm_client, "HEALTH_SECONDS", 0.1)
    monkeypatch.setattr(vllm_client, "DEAD_SECONDS", 0.5)
    with running(vllm_with_folder(engine, tmp_path, lambda what, values: values)) as address:
        recipe = recipe_in(place, *from_server(address, protocol="vllm", folder=str(tmp_path), timeout=60.0))
        teacher, _ = opened(recipe)
        states = teacher.client.protocol
        assert teacher.client.servers.silence() is None
    began = time.monotonic()
    told = rf"teacher\.url: a vLLM server has not answered .*{address}: Connection.*, and .*cmpl-9.* was not written"
    with pytest.raises(RunError, match=told) as gone:
        states.load(tmp_path / "cmpl-9.safetensors")
    assert time.monotonic() - began < 10 and "\n" not in str(gone.value)


@pytest.mark.full
def test_top_k_servers_that_die_are_reported_long_before_the_wait_is_over(place, engine, monkeypatch):
    """After a silence of 15 s, here of 1; one of two servers that stays is enough."""
    assert vllm_client.DEAD_SECONDS == 15.0
    monkeypatch.setattr(vllm_client, "HEALTH_SECONDS", 0.1)
    monkeypatch.setattr(vllm_client, "DEAD_SECONDS", 1.0)
    with running(vllm(engine)) as stays:
        with running(vllm(engine)) as dies:
            recipe = recipe_in(place, *from_server(dies, protocol="vllm", top_k=5, timeout=300.0))
            alone, _ = opened(recipe)
            both, _ = opened(recipe_in(place, *from_server(dies, stays, protocol="vllm", top_k=5, timeout=300.0)))
        assert both.client.servers.fetch("GET", "/v1/models").numel() > 0
        assert both.client.servers.silence() is not None and both.client.servers.silence(of_all=True) is None
    began = time.monotonic()
    with pytest.raises(RunError, match=rf"teacher\.url: no vLLM server has answered at /health .*{dies}") as gone:
        alone.client.servers.fetch("GET", "/v1/models")
    assert 1.0 <= time.monotonic() - began < 15 and "\n" not in str(gone.value)


def test_a_model_whose_files_lack_its_norm_is_refused(place, tmp_path):
    folder = shutil.copytree(place / "teacher", tmp_path / "teacher")
    held = load_file(folder / "model.safetensors")
    save_file(
        {n: t for n, t in held.items() if n != "model.norm.weight"}, folder / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(ValueError, match=r"teacher\.model: .*lack model\.norm\.weight"):
        load_ends(LocalTeacherConfig(model=str(folder)), torch.float32)


def test_the_number_of_logprobs_of_each_vllm_server_is_checked_first(place, engine):
    enough, too_few = [], []
    with running(vllm(engine, 64, asked=enough)) as first, running(vllm(engine, 20, asked=too_few)) as second:
        recipe = recipe_in(place, *from_server(first, second, protocol="vllm", top_k=30))
        with pytest.raises(RunError) as refused:
            opened(recipe)
    assert f"teacher.top_k: {second} gives fewer" in str(refused.value) and "--max-logprobs" in str(refused.value)
    assert "\n" not in str(refused.value) and enough == too_few == [[[0, 0]]], "two tokens of each server, once"


def test_server_settings_of_a_recipe_are_validated(place):
    for text, told in (
        (["teacher.url="], "url is missing"),
        (["teacher.url=ftp://x"], "expected http://"),
        (["teacher.url=http://me:secret@x"], "expected http://"),
        (["teacher.url=[http://x, http://x/]"], "each server once"),
        (["teacher.url=http://x", "teacher.dtype=fp8"], "give it to distill serve"),
        (["teacher.url=http://x", "teacher.offload=cpu"], "offload: belongs to type: model or student"),
        (["teacher.url=http://x", "parallel.teacher=sharded"], "requires a teacher whose weights are loaded"),
        (["teacher.url=http://x", "teacher.protocol=vllm"], "protocol: vllm needs top_k"),
        (["teacher.url=http://x", "teacher.protocol=vllm", "teacher.top_k=3", "teacher.folder=f"], "vllm needs top_k"),
        (["teacher.url=http://x", "teacher.folder=f"], "is for the hidden states of protocol: vllm"),
        (
            ["teacher.url=http://x", "teacher.top_k=3", "teacher.transfer_dtype=fp8"],
            "transfer_dtype: fp8 is for hidden states",
        ),
        (["teacher.url=http://x", "teacher.model=null", "student={from_teacher: {layers: 1}}"], "its layers are with"),
        (["teacher.url=http://x", "teacher.type=model"], "url: belongs to type: server"),
    ):
        with pytest.raises(ValueError, match=told):
            recipe_in(place, "teacher.type=server", *text) if text[0] != "teacher.type=model" else recipe_in(
                place, *text
            )
