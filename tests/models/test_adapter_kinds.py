"""Every kind of adapter that PEFT has, the head among its targets: a patched model computes what PEFT's own does."""

import warnings

import peft
import pytest
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from test_adoption import assert_same_step, batch
from tiny import tiny_model

import distill

TARGETS = ["q_proj", "down_proj", "lm_head"]
VOCABULARY = 320  # some kinds cut a layer into blocks of 64
SETTINGS = {
    "ADALORA": {"total_step": 10},
    "ADAPTION_PROMPT": {"adapter_len": 2, "adapter_layers": 1, "target_modules": None},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 8},
    "CPT": {
        "cpt_token_ids": [5, 6, 7, 8],
        "cpt_mask": [1] * 4,
        "cpt_tokens_type_mask": [1, 2, 3, 4],
        "num_virtual_tokens": 4,
    },
    "FOURIERFT": {"n_frequency": 10},
    "GRALORA": {"r": 4},
    "IA3": {"feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "MISS": {"r": 4},
    "MULTITASK_PROMPT_TUNING": {"num_tasks": 2},
    "POLY": {"n_tasks": 2},
    "OFT": {"oft_block_size": 4, "r": 0},
    "RANDLORA": {"r": 2},
    "SHIRA": {"r": 2},
    "TRAINABLE_TOKENS": {"token_indices": [3, 4], "target_modules": ["embed_tokens", "lm_head"]},
    "VBLORA": {"vector_length": 1, "num_vectors": 16},
    "WAVEFT": {"n_frequency": 8},
}
LORA_VARIANTS = {
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "bias": {"lora_bias": True},
    "dropout": {"lora_dropout": 0.1},
    "pissa": {"init_lora_weights": "pissa"},
}
TASKS = ("POLY", "MULTITASK_PROMPT_TUNING")
# kinds that no test here can make, and why
LEFT_OUT = {
    "XLORA": "a mixture of adapters that were saved before",
    "SHADOW": "PEFT's own forward fails with labels (its carrier is no tensor)",
}
KINDS = sorted(kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING if kind.value not in LEFT_OUT)
FUSED = {"LORA", "LN_TUNING", "ADAPTION_PROMPT"}  # the head is left as it is, or has a LoRA


def base():
    return tiny_model(tie=False, hidden=64, vocab_size=VOCABULARY)


def adapted(model, kind, **more):
    """Return the model with an adapter whose trained weights are no longer those of its beginning."""
    config = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind)]
    settings = {"task_type": "CAUSAL_LM"} | SETTINGS.get(kind, {}) | more
    if issubclass(config, peft.PromptLearningConfig):
        settings = {"num_virtual_tokens": 2} | settings
    else:
        settings = {"target_modules": TARGETS} | settings
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = peft.get_peft_model(model, config(**settings))
        except ImportError as error:
            pytest.skip(f"{kind}: {error}")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return made.eval()


def inputs(kind):
    given = batch()
    if kind in TASKS:
        given["task_ids"] = torch.tensor([0, 1])
    if kind == "CPT":  # the kind of each token, by which its loss is weighted: 4 is a label's
        given["input_type_mask"] = torch.full_like(given["input_ids"], 4)
    return given


@pytest.mark.plain(
    "LORA-adapter first",
    "OFT-adapter first",
    "LOKR-adapter first",
    "VBLORA-adapter first",
    "ADALORA-adapter first",
    "HRA-adapter first",
)
@pytest.mark.parametrize("order", ["adapter first", pytest.param("patch first", marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_patched_model_computes_what_peft_does(kind, order):
    original = adapted(base(), kind)
    model = base()
    if order == "patch first":
        distill.patch(model)
        model = adapted(model, kind)
    else:
        model = adapted(model, kind)
        report = distill.patch(model)
        prompts = getattr(model.active_peft_config, "is_prompt_learning", False)
        assert report.loss == (kind in FUSED or prompts)
        assert report.loss or report.left["loss"], "the reason is told"
    assert_same_step(model, original, **inputs(kind))


@pytest.mark.plain("rslora-patch first", "bias-adapter first", "dropout-patch first")
@pytest.mark.parametrize("order", ["adapter first", "patch first"])
@pytest.mark.parametrize("variant", LORA_VARIANTS)
def test_variants_of_lora_too(variant, order):
    settings = LORA_VARIANTS[variant]
    original = adapted(base(), "LORA", **settings)
    model = base()
    if order == "patch first":
        distill.patch(model)
        model = adapted(model, "LORA", **settings)
    else:
        model = adapted(model, "LORA", **settings)
        distill.patch(model)
    assert_same_step(model, original, **inputs("LORA"))


def test_the_objective_refuses_an_adapter_that_its_loss_would_read_wrongly():
    from distill.teachers.objective import DistillationObjective

    with pytest.raises(ValueError, match=r"lm_head: expected a plain torch.nn.Linear, got peft.*SVDLinear"):
        DistillationObjective(base(), adapted(base(), "ADALORA"))
