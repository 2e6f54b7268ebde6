"""The soft cap of attention scores: no version of transformers, no loader and no fallback of ours may drop it.

All versions are made to take `sdpa` for these models, as transformers 5.17 does; later ones raise where it is called.
"""

import pytest
import torch
from datasets import Dataset
from tiny import save_tiny, tiny_config, tiny_model
from transformers import Gemma2PreTrainedModel, TrainingArguments, VaultGemmaPreTrainedModel

from distill.generation import ragged_cache, support_check
from distill.generation.decode_loop import DecodeLoop, EngineSettings
from distill.generation.support_check import unsupported_reason
from distill.models.head import decoder_of
from distill.models.loading import load_student, load_teacher
from distill.models.patch.adoption import AutoFusedModelForCausalLM
from distill.models.patch.attention import keep_soft_cap, stop_fused_attention, use_fused_attention, with_soft_cap
from distill.recipe import FromTeacher, LocalTeacherConfig, Student
from distill.teachers.backends import sharded
from distill.training.trainer import DistillationTrainer

IDS = torch.randint(3, 259, (2, 11), generator=torch.Generator().manual_seed(1))
KINDS = ["gemma2", "vaultgemma"]


@pytest.fixture(autouse=True)
def taken_for_able(monkeypatch):
    """These models' classes say that PyTorch's attention serves them."""
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)
    monkeypatch.setattr(VaultGemmaPreTrainedModel, "_supports_sdpa", True)


def capped(kind="gemma2", cap=1.0, dtype=torch.float32, implementation="sdpa"):
    """A tiny model whose scores go far beyond its cap."""
    model = tiny_model(kind=kind, tie=False, attn_logit_softcapping=cap, query_pre_attn_scalar=1, sliding_window=6)
    set_implementation(model, implementation)
    return model.to(dtype)  # the same weights: drawn in another dtype they would be others


def set_implementation(model, name):
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_attn_implementation"):
            module.config._attn_implementation = name


@torch.no_grad()
def logits(model, **inputs):
    return model(**({"input_ids": IDS, "use_cache": False} | inputs)).logits.double()


def truth(kind="gemma2", cap=1.0, **inputs):
    """Return float64 results of whole forwards with scores capped by plain PyTorch."""
    return logits(capped(kind, cap, torch.float64, "eager"), **inputs)


def assert_capped(found, kind="gemma2", **inputs):
    expected, dropped = truth(kind, **inputs), truth(kind, None, **inputs)
    assert (expected - dropped).norm() > 0.05 * expected.norm()
    assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_on_pytorchs_attention_is_corrected(kind):
    model = capped(kind)
    with with_soft_cap(model):
        assert_capped(logits(model), kind)
    assert model.config._attn_implementation == "sdpa"
    keep_soft_cap(model)
    assert_capped(logits(model), kind)


@pytest.mark.parametrize("more", [{}, {"kind": "gemma2", "attn_logit_softcapping": None}])
def test_a_model_without_a_cap_keeps_its_attention(more):
    model = tiny_model(**more)
    set_implementation(model, "sdpa")
    keep_soft_cap(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_models_apply_it(kind, tmp_path):
    folder = save_tiny(tmp_path / "model", capped(kind))
    teacher = load_teacher(LocalTeacherConfig(model=str(folder)))
    assert_capped(logits(teacher), kind)
    assert_capped(logits(load_student(Student(model=str(folder))).eval()), kind)
    cut = load_student(Student(from_teacher=FromTeacher(keep=[0, 1])), teacher=teacher).eval()
    assert_capped(logits(cut), kind)
    fused = AutoFusedModelForCausalLM.from_pretrained(folder, attention=None)
    assert_capped(logits(fused.eval()), kind)


@pytest.mark.parametrize("in_shards", [False, True])
def test_random_models_apply_it(in_shards, tmp_path, hardware):
    config = tiny_config("gemma2", attn_logit_softcapping=1.0, query_pre_attn_scalar=1, initializer_range=0.15)
    config.to_json_file(tmp_path / "config.json")
    section, looked_at = LocalTeacherConfig(init="random", config=str(tmp_path)), []
    if in_shards:
        hardware.setattr(sharded, "shard_teacher", lambda model: None)  # one process holds all of it
        teacher, _ = sharded.load_sharded_teacher(
            section, device=torch.device("cpu"), dtype=torch.float32, attention=looked_at.append
        )
        assert [small.config._attn_implementation for small in looked_at] == ["eager"]
    else:
        teacher = load_teacher(section)
    found = logits(teacher)
    set_implementation(teacher, "eager")
    assert torch.equal(found, logits(teacher))


@pytest.mark.parametrize(
    ("load", "section", "field"),
    [(load_teacher, LocalTeacherConfig, "teacher"), (load_student, Student, "student")],
    ids=["teacher", "student"],
)
def test_pytorchs_attention_requested_by_name_is_refused(load, section, field, tmp_path):
    folder = save_tiny(tmp_path / "model", capped())
    with pytest.raises(ValueError, match=rf"{field}\..*(sdpa|scaled_dot_product_attention)"):
        load(section(model=str(folder), attention="sdpa"))
    with pytest.raises(ValueError, match="my_field: sdpa drops the soft cap"):
        keep_soft_cap(capped(), "sdpa", "my_field")


def test_the_trainer_corrects_given_models(tmp_path):
    student, teacher = capped(), capped()
    arguments = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to="none", disable_tqdm=True)
    DistillationTrainer(student, teacher, arguments, train_dataset=Dataset.from_dict({"input_ids": IDS.tolist()}))
    assert_capped(logits(student.eval()))
    assert_capped(logits(teacher))


def test_patched_models_apply_it_where_kernels_do_not_serve():
    model = capped()
    use_fused_attention(model, decoder_of(model))
    assert_capped(logits(model))
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0  # padded on the left
    seen = mask.bool()
    expected = truth()
    found = logits(model, attention_mask=mask)
    assert (found[1] - expected[1]).norm() < 1e-5 * expected[1].norm()
    alone = {"input_ids": IDS[:1, 4:], "position_ids": torch.arange(4, 11)[None]}
    assert_capped(found[:1][seen[:1]][None], **alone)
    assert_capped(logits(model, use_cache=True))
    stop_fused_attention(model, decoder_of(model))
    assert model.config._attn_implementation == "sdpa"


def whole_forwards(model, prompt, new):
    """Greedy tokens, each from one forward over everything before it, in `model`'s dtype."""
    ids = list(prompt)
    for _ in range(new):
        ids.append(int(logits(model, input_ids=torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_equals_full_forwards(kind):
    prompts = [[5, 6, 7, 8, 9, 10, 11], [40], list(range(30, 52))]
    model = capped(kind)
    assert unsupported_reason(model) is None
    found = DecodeLoop(model, EngineSettings(2, [])).generate(prompts, max_new_tokens=6).tokens
    exact, dropped = (capped(kind, cap, torch.float64, "eager") for cap in (1.0, None))
    assert found == [whole_forwards(exact, prompt, 6) for prompt in prompts]
    assert found != [whole_forwards(dropped, prompt, 6) for prompt in prompts]


def test_a_decode_loop_without_the_cap_is_rejected(fault):
    attend = ragged_cache.ragged_attention
    fault.setattr(
        support_check, "attention_for_ragged_cache", lambda model: ragged_cache.implementations(model, "careless")
    )
    ragged_cache.AttentionInterface.register(
        "careless", lambda *args, softcap=None, **kwargs: attend(*args, softcap=None, **kwargs)
    )
    assert "different" in unsupported_reason(capped())
    assert unsupported_reason(capped(cap=None)) is None
