"""Models with attention sinks (gpt-oss and its kin), patched: packed, padded and generating as plain transformers."""

import copy

import pytest
import torch
from helpers import FLOOR, SLACK, relative_error
from test_decode_loop import PROMPTS, theirs
from test_patching import assert_same
from tiny import tiny_model
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import distill
from distill.generation.decode_loop import DecodeLoop, EngineSettings
from distill.generation.ragged_cache import ragged_attention
from distill.generation.support_check import unsupported_reason
from distill.models.patch.attention import choose_attention, fused_attention
from distill.models.patch.packed import isolates_documents
from distill.models.patch.patching import patch, unpatch
from distill.teachers.opening import isolates_documents_with_kernels

LAYERS = ["sliding_attention", "full_attention"]
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
KINDS = {
    "gpt_oss": EXPERTS | {"sliding_window": 6, "layer_types": LAYERS},
    "granite_swa": {"sliding_window": 6, "layer_types": LAYERS},
    "granitemoe_swa": EXPERTS | {"sliding_window": 6, "layer_types": LAYERS},
    "flint": {},
}
KINDS = {kind: settings for kind, settings in KINDS.items() if kind in CONFIG_MAPPING}  # newer than transformers 5.17
WINDOWED = "granite_swa" if "granite_swa" in KINDS else "gpt_oss"  # a layer with a window and one without
DOCUMENTS = [9, 1, 12]
NEW = 9  # tokens: beyond the window


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


@pytest.mark.plain("gpt_oss-left", "granite_swa-left", "granitemoe_swa-left", "flint-left")
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


@pytest.mark.full  # the other kinds are the same to the kernels
def test_on_the_kernels_themselves(kernel_device):
    model = make(WINDOWED, hidden=64).to(kernel_device)
    ids, positions = rows(kernel_device)
    alone = torch.cat([model(input_ids=part, use_cache=False).logits for part in ids.split(DOCUMENTS, 1)], 1)
    expected = gradients(model, alone)
    assert patch(model).attention == "triton"  # a kernel that computes something else is not taken
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


@pytest.mark.full  # their experts: tests/rollouts/test_mixture_decoding.py
@pytest.mark.parametrize("kind, patched", [("gpt_oss", False), (WINDOWED, False), (WINDOWED, True)])
def test_greedy_tokens_are_those_of_generate(kind, patched, kernel_device):
    model = make(kind, **({} if kernel_device.type == "cpu" else {"hidden": 64}))
    tokens, truncated = theirs(model, PROMPTS, NEW)
    assert len({tuple(t) for t in tokens}) > 1
    model = model.to(kernel_device)
    if patched:
        patch(model)
    found = DecodeLoop(model, EngineSettings(2, [0])).generate(PROMPTS, max_new_tokens=NEW)
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


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[2048], [700, 100, 1, 900]], ids=str)
def test_packed_documents_of_gpt_oss_shapes_are_as_exact_as_eager_alone(lengths):
    """Attention of gpt-oss-20b's sizes in two layers, and few experts, in bf16 against fp32."""
    config = GptOssConfig(
        num_hidden_layers=2,
        layer_types=LAYERS,
        num_local_experts=4,
        num_experts_per_tok=4,
        vocab_size=1024,
        pad_token_id=0,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    wide, patched = copy.deepcopy(plain).float(), copy.deepcopy(plain)
    assert patch(patched, log_it=False).attention == "triton"
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(3, 1024, (length,), generator=generator).cuda() for length in lengths]
    positions = torch.cat([torch.arange(length, device="cuda") for length in lengths])[None]
    upstream = torch.randn(sum(lengths), config.hidden_size, device="cuda")

    def alone(model):
        return torch.cat([model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0] for ids in documents])

    def values(model, hidden):
        hidden.backward(upstream.to(hidden.dtype))
        learned = {name: p.grad for name, p in model.named_parameters() if "self_attn" in name and p.grad is not None}
        return {"hidden": hidden.detach(), **learned}

    packed = patched.model(input_ids=torch.cat(documents)[None], position_ids=positions, use_cache=False)
    right = values(wide, alone(wide))

    def errors(made):
        assert made.keys() == right.keys()
        each = {name: relative_error(value, right[name]) for name, value in made.items()}
        rows = torch.linalg.vector_norm(made["hidden"].double() - right["hidden"], dim=-1)
        return {
            "hidden states": each.pop("hidden"),
            "worst token": (rows.max() / torch.linalg.vector_norm(right["hidden"].double(), dim=-1).mean()).item(),
            "gradients": max(each.values()),
            "gradients of sinks": max(error for name, error in each.items() if name.endswith("sinks")),
        }

    eager = errors(values(plain, alone(plain)))
    for name, error in errors(values(patched, packed.last_hidden_state[0])).items():
        assert error <= SLACK * eager[name] + FLOOR[torch.bfloat16], name
