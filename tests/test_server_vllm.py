"""vLLM as a teacher, read as its documentation has it: it never ran beside the real one. And what recipes may say."""

import numpy as np
import pytest
import torch
from served import engine_in, from_server, opened, recipe_in, write_models
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from distill.core.faults import RunError
from distill.data.collator import Collator
from distill.run import run
from distill.serving.open import running
from distill.teachers.cache.encode import Encoding, encode
from distill.teachers.cache.top_k import top_k_targets
from distill.training.lock import read_lock


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("place"), kind="gemma2", final_logit_softcapping=5.0)


@pytest.fixture(scope="module")
def engine(place):
    return engine_in(place)


def vllm(engine, most=20, shifted=False, asked=None):
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
                logp = engine.model(input_ids=torch.tensor([prompt])).logits[0].float().log_softmax(-1)
            entries = [None]
            for token, row in zip(prompt[1:], logp[:-1], strict=True):
                chosen = [token, *row.topk(k).indices.tolist()]
                entries.append({str(one): {"logprob": row[one].item(), "rank": int((row > row[one]).sum()) + 1,
                                           "decoded_token": "?"} for one in chosen})  # fmt: skip
            entries = [*entries[1:], None] if shifted else entries
            choices.append({"index": index, "text": "", "prompt_logprobs": entries, "finish_reason": "length"})
        return JSONResponse({"id": "cmpl-1", "object": "text_completion", "choices": choices[::-1]})

    return Starlette(routes=[Route("/v1/models", models), Route("/v1/completions", completions, methods=["POST"])])


def test_vllm_is_read_as_its_documentation_has_it(place, engine):
    with running(vllm(engine)) as address:
        recipe = recipe_in(place, *from_server(address, protocol="vllm", top_k=8), "loss.terms.0.type=reverse_kl")
        teacher, vocabulary = opened(recipe)
        rows = [vocabulary.read(recipe.data, 0).train[number] for number in range(3)]
        batch = teacher.collate(Collator(2))(rows)
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


def test_how_many_logprobs_each_vllm_gives_is_asked_before_anything_else(place, engine):
    enough, too_few = [], []
    with running(vllm(engine, 64, asked=enough)) as first, running(vllm(engine, 20, asked=too_few)) as second:
        recipe = recipe_in(place, *from_server(first, second, protocol="vllm", top_k=30))
        with pytest.raises(RunError) as refused:
            opened(recipe)
    assert f"teacher.top_k: {second} gives fewer" in str(refused.value) and "--max-logprobs" in str(refused.value)
    assert "\n" not in str(refused.value) and enough == too_few == [[[0, 0]]], "two tokens of each server, once"


def test_what_a_recipe_may_say_of_servers(place):
    for text, told in (
        (["teacher.url="], "url is missing"),
        (["teacher.url=ftp://x"], "expected http://"),
        (["teacher.url=http://me:secret@x"], "expected http://"),
        (["teacher.url=[http://x, http://x/]"], "each server once"),
        (["teacher.url=http://x", "teacher.dtype=fp8"], "give it to distill serve"),
        (["teacher.url=http://x", "teacher.offload=cpu"], "no teacher is loaded"),
        (["teacher.url=http://x", "parallel.teacher=sharded"], "no meaning with teacher.type: server"),
        (["teacher.url=http://x", "teacher.protocol=vllm"], "protocol: vllm needs top_k"),
        (["teacher.url=http://x", "teacher.top_k=3", "teacher.send=fp8"], "send: fp8 is for hidden states"),
        (["teacher.url=http://x", "teacher.model=null", "student={from_teacher: {layers: 1}}"], "its layers are with"),
        (["teacher.url=http://x", "teacher.type=model"], "url: belongs to type: server"),
    ):
        with pytest.raises(ValueError, match=told):
            recipe_in(place, "teacher.type=server", *text) if text[0] != "teacher.type=model" else recipe_in(
                place, *text
            )
