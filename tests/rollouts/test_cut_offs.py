"""Sampling filters: temperature and cut-offs match transformers' own in every engine that runs here."""

import itertools

import pytest
import torch
from distill_kernels.sampling import sample_tokens
from helpers import ops_called
from tiny import save_models, tiny_model, tiny_tokenizer
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from distill.data.chat import load_template
from distill.data.report import DataReport
from distill.generation.decode_loop import DecodeLoop, EngineSettings, Request
from distill.generation.engines import TransformersEngine
from distill.generation.from_recipe import rollouts_from_recipe
from distill.generation.sampling import Sampling
from distill.recipe import parse

RECIPE = """
teacher: {model: teacher}
student: {model: student}
data: {source: pairs.jsonl, on_policy: {max_new_tokens: 8}}
loss: {terms: [{type: reverse_kl}]}
train: {steps: 3, device: cpu}
"""
PROMPTS = [[5, 6, 7, 8], [40], [100, 3, 77], [200, 201]]


def warpers(sampling):
    """Return the logits warpers in transformers' order."""
    chain = [TemperatureLogitsWarper(sampling.temperature)]
    chain += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    chain += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    chain += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    return LogitsProcessorList(chain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_cut_offs_leave_what_transformers_leaves(dtype):
    """Alone and after each other; 16 bits have equal logits, whose order decides what is left."""
    generator = torch.Generator().manual_seed(3)
    logits = (3 * torch.randn(7, 503, generator=generator, dtype=torch.float64)).to(dtype)
    logits[2] = 1.0
    logits[3, 40:] = float("-inf")
    left = set()
    for chosen in itertools.product((0.7, 1.0, 1.9), (0, 1, 20, 900), (1.0, 0.9, 0.3, 1e-9), (0.0, 0.05, 1.0)):
        sampling = Sampling(*chosen)
        wide = logits.to(torch.promote_types(dtype, torch.float32))
        torch.testing.assert_close(sampling.restrict(logits), warpers(sampling)(None, wide), rtol=0, atol=0)
        assert sampling.has_cut_offs == (chosen[1:] != (0, 1.0, 0.0))
        left.add(int(sampling.restrict(logits).isfinite().sum()))
    assert len(left) > 20


@pytest.mark.gpu
def test_cut_offs_on_a_gpu_are_those_of_a_cpu():
    """Under `train.deterministic` too, where PyTorch refuses sums of floats one after the other."""
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(3, 151_936, generator=generator)
    torch.use_deterministic_algorithms(True)
    try:
        for sampling in (
            Sampling(0.7, 50),
            Sampling(1.3, top_p=0.9),
            Sampling(1.0, min_p=0.02),
            Sampling(1, 90, 0.9, 0.1),
        ):
            found, expected = sampling.restrict(logits.cuda()).cpu().isfinite(), sampling.restrict(logits).isfinite()
            assert (found != expected).sum() <= 3, "at most the last one of a row, by rounding"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.plain(
    "DecodeLoop-Sampling(temperature=0.5, top_k=6, top_p=1.0, min_p=0.0)",
    "DecodeLoop-Sampling(temperature=1.0, top_k=8, top_p=0.8, min_p=0.3)",
    "TransformersEngine-Sampling(temperature=1.0, top_k=0, top_p=0.5, min_p=0.0)",
)
@pytest.mark.parametrize("sampling", [Sampling(0.5, top_k=6), Sampling(1.0, top_p=0.5), Sampling(1.0, 8, 0.8, 0.3)])
@pytest.mark.parametrize("engine", [DecodeLoop, TransformersEngine])
def test_samples_follow_the_restricted_distribution(engine, sampling):
    """Over many seeds: no other tokens, each as often as it is likely; figures are of the whole distribution."""
    model, count = tiny_model(dtype=torch.float64, tie=False), 1500
    with torch.no_grad():
        model.lm_head.weight *= 2
    full = model(torch.tensor([PROMPTS[0]])).logits[:, -1].float()
    expected = warpers(sampling)(None, full).softmax(-1)[0]
    assert 1 < int((expected > 0).sum()) < 30 and expected[expected > 0].min() > 0.005
    made = engine(model, EngineSettings(2, [], log_probs=True)).generate(
        [PROMPTS[0]] * count, max_new_tokens=1, sampling=sampling, seeds=range(count), batch_size=500
    )
    drawn = torch.tensor(made.tokens)[:, 0]
    assert set(drawn.tolist()) == set(expected.nonzero()[:, 0].tolist())
    share = drawn.bincount(minlength=len(expected)) / count
    assert ((share - expected).abs() < 4.5 * (expected * (1 - expected) / count).sqrt() + 1e-9).all()
    exact = full.double().log_softmax(-1)[0, drawn]
    torch.testing.assert_close(torch.tensor(made.log_probs, dtype=torch.float64)[:, 0], exact, rtol=0, atol=1e-5)


def test_without_cut_offs_nothing_is_cut():
    """The tokens are those of the sampling kernel on the logits themselves; cut-offs that leave all draw them too."""
    model, seeds = tiny_model(dtype=torch.float64), torch.tensor([7, -3, 2**62, 99])
    expected = []
    for prompt, seed in zip(PROMPTS, seeds, strict=True):
        ids = torch.tensor([prompt])
        for number in range(6):
            token = sample_tokens(model(ids).logits[:, -1], seed[None], torch.tensor([number]), 0.8)
            ids = torch.cat([ids, token[None]], 1)
        expected.append(ids[0, len(prompt) :].tolist())

    def tokens(sampling, cuts):
        loop = DecodeLoop(model, EngineSettings(2, []))
        with ops_called("aten::sort", "aten::topk", "aten::cumsum", "aten::masked_fill") as calls:
            found = loop.generate(PROMPTS, max_new_tokens=6, sampling=sampling, seeds=seeds.tolist()).tokens
        assert any(call.args[0].shape[-1] in (259, 3) for call in calls) == cuts
        return found

    assert tokens(Sampling(0.8, 259, 1 - 1e-12, 1e-12), True) == expected
    assert tokens(Sampling(0.8, top_k=3), True) != expected
    assert tokens(Sampling(0.8), False) == expected
    assert tokens(Sampling(0.0, 5, 0.5, 0.5), False) == tokens(Sampling(0.0), False) != expected


def test_a_step_is_captured_for_one_sampling():
    loop = DecodeLoop(tiny_model(), EngineSettings(2, []))
    slots = loop._slots_for(Request(PROMPTS, [2] * 4, [1] * 4, Sampling(1.0), 4))
    weights = tuple(parameter.data_ptr() for parameter in loop.model.parameters())
    patches = tuple(id(None) for _ in loop.model.modules())
    slots.graph, slots.captured_key = "a graph", (Sampling(1.0), weights, patches)
    loop._capture(slots, Sampling(1.0))
    assert slots.graph == "a graph"
    with pytest.raises(AssertionError):  # there is no stream to capture on
        loop._capture(slots, Sampling(1.0, top_p=0.9))
    assert slots.graph is None


@pytest.mark.parametrize("engine", ["distill", "transformers"])
def test_sampling_parameters_come_from_the_recipe(engine):
    wanted = ("temperature=0.9", "top_k=4", "top_p=0.8", "min_p=0.02", f"engine={engine}", r'stop=[END, "\n"]')
    overrides = [f"data.on_policy.{setting}" for setting in wanted]
    model, tokenizer = tiny_model(tiny_tokenizer()), tiny_tokenizer()
    template = load_template("tokenizer", tokenizer)
    more = {"template": template, "report": DataReport(format="chat (messages)"), "vocab_size": 259}
    own = rollouts_from_recipe(parse(RECIPE, overrides), model, tokenizer, **more)
    assert own.sampling == Sampling(0.9, 4, 0.8, 0.02)
    stop = own.engine.settings.stop if engine == "distill" else own.engine.stop
    assert stop.strings == ("END", "\n") and stop.tokenizer is tokenizer
    plain = rollouts_from_recipe(parse(RECIPE), model, tokenizer, **more)
    assert plain.sampling == Sampling(1.0) and not plain.sampling.has_cut_offs and plain.engine.settings.stop is None


def test_another_sampling_is_another_run(tmp_path, monkeypatch):
    """A run is not resumed with other sampling settings, as with another temperature."""
    from distill.recipe.resume_policy import settings_of_steps

    before = settings_of_steps(parse(RECIPE), 1)
    for change in ("temperature=0.5", "top_k=5", "top_p=0.5", "min_p=0.1", "stop=[a]", "samples=1"):
        now = settings_of_steps(parse(RECIPE, [f"data.on_policy.{change}"]), 1)
        assert (now != before) == (change != "samples=1"), change


@pytest.mark.full
def test_the_command_draws_by_them(tmp_path, monkeypatch):
    """Keeping one token is greedy at any temperature, and files record the sampling settings."""
    import json

    from distill.cli import run_command

    save_models(tmp_path, teacher={"layers": 3, "seed": 1}, student={"seed": 2})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "q.txt").write_text("What?\nWhere to?\n")
    rows = {}
    for name, options in {
        "greedy": ["--temperature", "0"],
        "k": ["--temperature", "5", "--top-k", "1"],
        "p": ["--temperature", "5", "--top-p", "0.00001"],
        "m": ["--temperature", "5", "--min-p", "1"],
        "free": ["--temperature", "5"],
    }.items():
        command = ["sample", "r.yaml", "--prompts", "q.txt", "--from", "teacher", "--out", f"{name}.jsonl"]
        assert run_command([*command, "--max-new-tokens", "6", *options]) == 0
        rows[name] = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
    answers = {name: [row["completion"] for row in own] for name, own in rows.items()}
    assert answers["k"] == answers["p"] == answers["m"] == answers["greedy"] != answers["free"]
    made = [rows[name][0]["sampled"] for name in ("free", "k", "p", "m")]
    settings = {"by", "max_new_tokens", "temperature", "seed"}
    assert set(made[0]) == settings | {"ended", "prompt", "same_text", "tokenizer"}
    assert [made[1]["top_k"], made[2]["top_p"], made[3]["min_p"]] == [1, 0.00001, 1.0]
    again = ["sample", "r.yaml", "--prompts", "q.txt", "--from", "teacher", "--out", "k.jsonl", "--max-new-tokens", "6"]
    assert run_command([*again, "--temperature", "5"]) == 2
