"""Models with attention sinks (gpt-oss and its kin), patched: packed, padded and generating as plain transformers."""

import copy

import pytest
import torch
from test_decode_loop import PROMPTS, theirs
from test_patching import assert_same
from tiny import tiny_model
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import distill
from distill.generation.decode_loop import DecodeLoop, EngineSettings
from distill.generation.ragged_cache import ragged_attention
from distill.generation.support_check import unsupported_reason
from distill.models.patch.attention import choose_attention, fused_attention
from distill.models.patch.packed import isolates_documents
from distill.models.patch.patching import patch, unpatch
from distill.teachers.opening import isolates_documents_with_kernels
from scripts.bench import gpt_oss
from scripts.bench.harness import time_in_turn

LAYERS = ["sliding_attention", "full_attention"]
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
KINDS = {
    "gpt_oss": EXPERTS | {"sliding_window": 6, "layer_types": LAYERS},
    "granite_swa": {"sliding_window": 6, "layer_types": LAYERS},
    "granitemoe_swa": EXPERTS | {"sliding_window": 6, "layer_types": LAYERS},
    "flint": {},
}
KINDS = {kind: settings for kind, settings in KINDS.items() if kind in CONFIG_MAPPING}  # newer than transformers 5.17
DOCUMENTS = [9, 1, 12]


def make(kind, **more):
    model = tiny_model(kind=kind, **(KINDS[kind] | more))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # sinks among them, which start as zeros in some
                parameter += 0.5 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return model


def rows(device="cpu"):
    ids = torch.randint(3, 259, (2, sum(DOCUMENTS)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS]).expand(2, -1)
    return ids.to(device), positions.to(device)


def gradients(model, logits):
    model.zero_grad()
    (logits * torch.linspace(0.5, 1.5, logits.shape[-1], device=logits.device)).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(given, expected, tolerance):
    assert given.keys() == expected.keys()
    assert sum("sinks" in name for name in given) == 2
    for name, gradient in expected.items():
        assert not name.endswith("sinks") or gradient.any()
        assert_same(given[name], gradient, tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_give_what_documents_give_alone(kind):
    model = make(kind)
    ids, positions = rows()
    alone = torch.cat([model(input_ids=part, use_cache=False).logits for part in ids.split(DOCUMENTS, 1)], 1)
    expected = gradients(model, alone)
    report = patch(model)
    assert report.attention == "triton" and "attention" not in report.left, str(report)
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert_same(logits, alone)
    assert_same_gradients(gradients(model, logits), expected, 1e-4)


@pytest.mark.parametrize("form", ["none", "left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_document_a_row_and_padding(kind, form):
    model, (ids, _) = make(kind), rows()
    mask = torch.ones_like(ids)
    mask[0, {"none": slice(0), "left": slice(5), "right": slice(-5, None)}[form]] = 0
    inputs = {"input_ids": ids, "use_cache": False} | ({} if form == "none" else {"attention_mask": mask})
    kept = mask.bool()
    plain = model(**inputs).logits[kept]
    expected = gradients(model, plain)
    report = patch(model)
    logits = model(**inputs).logits[kept]
    assert_same(logits, plain)
    assert_same_gradients(gradients(model, logits), expected, 1e-4)
    unpatch(model)
    assert_same(model(**inputs).logits[kept], plain, 1e-9)
    assert report.attention == "triton"


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_on_the_kernels_themselves(kind, kernel_device):
    model = make(kind, hidden=64).to(kernel_device)
    ids, positions = rows(kernel_device)
    alone = torch.cat([model(input_ids=part, use_cache=False).logits for part in ids.split(DOCUMENTS, 1)], 1)
    expected = gradients(model, alone)
    patch(model)
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert_same(logits, alone, 1e-3)
    assert_same_gradients(gradients(model, logits), expected, 3e-3)


def test_gpt_oss_is_packed_by_our_attention_alone():
    model = make("gpt_oss")
    assert not isolates_documents(model)  # transformers' own masks are not told of positions
    assert isolates_documents_with_kernels(model)


def test_the_loss_of_a_patched_model():
    model = make("gpt_oss")
    ids, _ = rows()
    expected = model(input_ids=ids, labels=ids, use_cache=False).loss
    distill.patch(model)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.plain("gpt_oss-False")
@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_generate(kind, patched, kernel_device):
    model = make(kind, **({} if kernel_device.type == "cpu" else {"hidden": 64}))
    tokens, truncated = theirs(model, PROMPTS, 9)
    assert len({tuple(t) for t in tokens}) > 1
    model = model.to(kernel_device)
    if patched:
        patch(model)
    found = DecodeLoop(model, EngineSettings(2, [0])).generate(PROMPTS, max_new_tokens=9)
    assert found.tokens == tokens and found.truncated == truncated
    assert unsupported_reason(model) is None


def test_no_back_end_without_sinks_is_chosen_or_used():
    model, (ids, _) = make("gpt_oss", dtype=torch.bfloat16, layers=1, layer_types=["full_attention"]), rows()
    assert choose_attention(model, 2, 64, backward=True) == ("triton", {})
    other = copy.deepcopy(model)
    patch(model, attention="cudnn")
    patch(other)
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, other(input_ids=ids, use_cache=False).logits)


@pytest.mark.parametrize("name", ["position_bias", "indices", "block_indices", "sinks"])
@pytest.mark.parametrize("function", [fused_attention, ragged_attention])
def test_scores_of_another_kind_are_refused(function, name):
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match=f"attention: expected no {name}, "):
        function(torch.nn.Identity(), q, q, q, None, **{name: q})


def test_sinks_under_a_mask_are_not_dropped():
    q, sinks = torch.zeros(1, 2, 4, 8), torch.zeros(2)
    with pytest.raises(ValueError, match="attention: sinks with a mask or cache"):
        fused_attention(torch.nn.Identity(), q, q, q, torch.zeros(1, 1, 4, 4), s_aux=sinks)


def test_the_benchmarks_candidates_agree():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    plain, patched = gpt_oss.pair("cpu", torch.float32, **sizes, head_dim=8, vocab_size=259, sliding_window=6)
    found = gpt_oss.errors(plain, patched, gpt_oss.draw(DOCUMENTS, 259, "cpu"))
    assert set(found) == {gpt_oss.ALONE, gpt_oss.PADDED, gpt_oss.OURS}
    assert max(error for errors in found.values() for error in errors.values()) < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[2048], [700, 100, 1, 900]], ids=str)
def test_gpt_oss_shapes_are_as_exact_as_eager_and_faster(lengths):
    """Attention of gpt-oss-20b's sizes in two layers, and few experts."""
    plain, patched = gpt_oss.pair("cuda", torch.bfloat16, num_local_experts=4)
    documents = gpt_oss.draw(lengths, 1024, "cuda")
    found = gpt_oss.errors(plain, patched, documents)
    assert gpt_oss.passes(found[gpt_oss.OURS], found[gpt_oss.ALONE]), found
    bodies = gpt_oss.bodies(plain, patched, documents)
    times = time_in_turn({name: lambda body=body: body().sum().backward() for name, body in bodies.items()}, rounds=5)
    assert times[gpt_oss.OURS] < min(ms for name, ms in times.items() if name != gpt_oss.OURS), times
