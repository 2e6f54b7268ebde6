"""The hand-over of a student to vLLM, with a stand-in that reads the folder as vLLM does: tied models keep their first
head. What vLLM itself does is in test_engine_vllm.py."""

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_model, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from distill.core.errors import RunError
from distill.generation.decode_loop import EngineSettings
from distill.generation.engines import engine_for
from distill.generation.sampling import Sampling
from distill.generation.stopping import StopStrings
from distill.generation.vllm_engine import response_log_probs, save_untied
from distill.models.adapters import add_lora
from distill.recipe import Lora

PROMPTS = [[5, 6, 7], [8, 9]]


class LLM:
    """Greedy answers of the model in a folder."""

    kept: ClassVar[list["LLM"]] = []

    def __init__(self, **settings):
        self.settings, self.calls, self.asked, self.shift = settings, [], [], 0.0
        self.read()
        LLM.kept.append(self)

    def read(self):
        folder = Path(self.settings["model"])
        tensors = {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
        config = AutoConfig.from_pretrained(folder)
        head = None if not self.calls or not config.tie_word_embeddings else self.model.lm_head.weight.detach().clone()
        self.model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, self.settings["dtype"])).eval()
        self.model.load_state_dict(tensors, strict=False)
        if head is not None:
            self.model.lm_head.weight = torch.nn.Parameter(head)

    def collective_rpc(self, name):
        self.calls.append(name)
        self.read()

    def reset_prefix_cache(self):
        self.calls.append("reset")

    @torch.no_grad()
    def generate(self, requests, settings, use_tqdm):
        self.asked.extend(settings)
        outputs = []
        for request, each in zip(requests, settings, strict=True):
            ids, log_probs = list(request["prompt_token_ids"]), []
            for _ in range(each["max_tokens"]):
                row = self.model(input_ids=torch.tensor([ids])).logits[0, -1].float().log_softmax(-1) + self.shift
                allowed = row if each["allowed_token_ids"] is None else row[: len(each["allowed_token_ids"])]
                ids.append(int(allowed.argmax()))
                log_probs.append({ids[-1]: SimpleNamespace(logprob=float(row[ids[-1]]))})
            answer = ids[len(request["prompt_token_ids"]) :]
            given = None if each["logprobs"] is None else log_probs
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=answer, logprobs=given)]))
        return outputs


@pytest.fixture
def vllm(monkeypatch):
    """The stand-ins that were started, the last one last."""
    LLM.kept = []
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM, SamplingParams=dict, __spec__=object()))
    return LLM.kept


def change(model):
    """Another model: embedding rows in another order, and a layer."""
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight.flip(0))
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_call_is_answered_by_the_weights_as_they_are(tie, dtype, vllm):
    model, tokenizer = tiny_model(tie=tie, dtype=dtype), tiny_tokenizer()
    settings = EngineSettings(2, [0], max_length=32, log_probs=True)
    made = engine_for("vllm", model, settings, tokenizer=tokenizer, trains=True)
    own = engine_for("transformers", model, settings)
    for _ in range(3):
        answers, expected = (engine.generate(PROMPTS, max_new_tokens=[3, 5]) for engine in (made, own))
        if dtype == torch.float32:
            assert answers.tokens == expected.tokens
        assert torch.tensor(list(itertools.chain(*answers.log_probs))) == pytest.approx(
            torch.cat([response_log_probs(model, p, t) for p, t in zip(PROMPTS, answers.tokens, strict=True)]).numpy(),
            abs=1e-4 if dtype == torch.float32 else 0.05,
        )
        change(model)
    assert vllm[0].calls == ["reload_weights", "reset"] * 2
    made.generate(PROMPTS, max_new_tokens=2)
    made.generate(PROMPTS, max_new_tokens=2, same_weights=True)
    assert vllm[0].calls == ["reload_weights", "reset"] * 3
    assert vllm[0].settings["dtype"] == str(dtype).removeprefix("torch.")


def test_an_engine_that_holds_other_weights_ends_the_run(vllm, fault):
    """The engine behaves like a vLLM whose head is not reloaded."""
    from distill.generation import vllm_engine
    from distill.models.loading import save_student

    fault.setattr(vllm_engine, "save_untied", save_student)
    model = tiny_model(tie=True)
    made = engine_for("vllm", model, EngineSettings(2, [0], max_length=32), tokenizer=tiny_tokenizer(), trains=True)
    assert made.generate(PROMPTS, max_new_tokens=4).log_probs == []
    change(model)
    with pytest.raises(RunError, match=r"data\.on_policy\.engine: expected vLLM to compute the student's own"):
        made.generate(PROMPTS, max_new_tokens=4)


def test_log_probabilities_that_are_off_by_more_than_rounding_end_the_run(vllm):
    model = tiny_model()
    made = engine_for("vllm", model, EngineSettings(2, [0], max_length=32), tokenizer=tiny_tokenizer(), trains=True)
    vllm[0].shift = 5e-4
    made.generate(PROMPTS, max_new_tokens=4)
    vllm[0].shift = 2e-3
    with pytest.raises(RunError, match=r"got 2\.0e-03 over 4 tokens"):
        made.generate(PROMPTS, max_new_tokens=4)


@pytest.mark.parametrize("lora", [None, Lora(r=2), Lora(r=2, head=True)])
@pytest.mark.parametrize("tie", [True, False])
def test_the_folder_holds_a_head_of_its_own(tie, lora, tmp_path):
    model = tiny_model(tie=tie)
    if lora is not None:
        model = add_lora(model, lora, seed=1)
        with torch.no_grad():
            for name, value in model.named_parameters():
                if "lora_B" in name:
                    value.add_(0.1)
    save_untied(model, tiny_tokenizer(), tmp_path / "m")
    assert not json.loads((tmp_path / "m" / "config.json").read_text())["tie_word_embeddings"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    assert again.lm_head.weight is not again.model.embed_tokens.weight
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.allclose(again(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-5)


def test_columns_limits_and_stop_strings_are_passed_on(vllm):
    tokenizer = tiny_tokenizer()
    stop = StopStrings(tokenizer, ["END"])
    settings = EngineSettings(2, [0], vocab_size=200, max_length=64, log_probs=True, stop=stop)
    made = engine_for("vllm", tiny_model(tokenizer), settings, tokenizer=tokenizer)
    made.generate(PROMPTS, max_new_tokens=[4, 6], sampling=Sampling(0.7, 3, 0.9, 0.1))
    made.stop = None
    made.generate(PROMPTS[:1], max_new_tokens=5)
    first, second, last = vllm[0].asked
    assert first["stop"] == ["END"] and first["detokenize"] and first["allowed_token_ids"] == list(range(200))
    assert [first[name] for name in ("temperature", "top_k", "top_p", "min_p")] == [0.7, 3, 0.9, 0.1]
    assert (first["max_tokens"], second["max_tokens"]) == (4, 6)
    assert last["stop"] is None and not last["detokenize"] and last["top_k"] == -1
    assert vllm[0].calls == [], "a model that does not train is handed over once"
    assert vllm[0].settings["max_model_len"] == 65
