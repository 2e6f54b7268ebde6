"""Frozen weights in 4 bits: what is computed and trained equals dense layers that hold the dequantised weights."""

import copy
import importlib
import json
import logging
import shutil
import warnings

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import PeftModel
from safetensors.torch import load_file
from test_run import PLACE
from test_run import recipe as run_recipe
from tiny import save_tiny, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

from distill.cli import run_command
from distill.core.startup import silence_libraries
from distill.models.adapters import add_lora, load_and_merge, merged, save_adapter
from distill.models.dtypes import is_in_4_bits
from distill.models.flops import count_flops, parameters_of
from distill.models.load.fingerprint import fingerprint
from distill.models.loading import load_student, load_teacher
from distill.models.precision.nf4 import dequantise_nf4
from distill.planning.devices import find_device
from distill.planning.preflight import check_run
from distill.recipe import LocalTeacherConfig, Lora, Student, load
from distill.recipe.shipped import find_recipe
from distill.run import run

pytestmark = PLACE

IDS = torch.arange(3, 40)[None]
LORA = {"r": 4, "alpha": 16}
IN_4_BITS = (f"student={{model: student, dtype: nf4, lora: {json.dumps(LORA)}}}", "train.learning_rate=2e-2")
# the 16 values of NormalFloat4, by formula (4) and appendix E of Dettmers et al., 2023 (arXiv 2305.14314)
LEVELS = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


@pytest.fixture
def base(tmp_path):
    """A model with biases and a tied head, whose layers are not of a multiple of 64 columns."""
    model = tiny_model(kind="qwen2", layers=3, hidden=96, seed=1)
    return str(save_tiny(tmp_path / "base", model))


def student_of(base, *, seed=3, **more):
    """A student with adapters that add something, and its dense twin, which holds the dequantised weights."""
    student = load_student(Student(model=base, dtype="nf4", lora=Lora(**LORA)), dtype=torch.float32)
    lora = Lora(**LORA | more)
    plain = load_student(Student(model=base, dtype="nf4", lora=Lora()).model_copy(update={"lora": None}))
    dense = add_lora(dequantise_nf4(copy.deepcopy(plain), "cpu"), lora)
    student = add_lora(plain, lora)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in adapters_of(student).items():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
            adapters_of(dense)[name].copy_(weight)
    return student, dense


def adapters_of(model):
    return {name: p for name, p in model.named_parameters() if "lora_" in name}


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


# ---------------------------------------------------------------- the weights


def test_linear_layers_of_the_decoder_are_in_4_bits_and_nothing_else(base):
    before = AutoModelForCausalLM.from_pretrained(base)
    model = load_teacher(LocalTeacherConfig(model=base, dtype="nf4"))
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not model.lm_head]
    assert len(layers) == 3 * 7 and all(isinstance(layer, Linear4bit) for layer in layers)
    assert type(model.lm_head) is nn.Linear and model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, before.lm_head.weight)
    packed = sum(layer.weight.nbytes for layer in layers)
    assert packed == sum(m.weight.numel() for m in before.model.modules() if isinstance(m, nn.Linear)) / 2
    dense = dequantise_nf4(copy.deepcopy(model), "cpu")
    levels = torch.tensor(LEVELS)
    for name, module in dense.named_modules():
        if isinstance(module, nn.Linear) and module is not dense.lm_head:
            exact = before.get_submodule(name)
            assert module.bias is None or torch.equal(module.bias, exact.bias)
            for blocks in zip(module.weight.flatten().split(64), exact.weight.flatten().split(64), strict=True):
                ours, theirs = (block.detach() for block in blocks)
                largest = theirs.abs().max()
                # the nearest level of the block's largest weight, which is itself in 8 bits
                nearest = levels[(theirs[:, None] / largest - levels).abs().argmin(1)] * largest
                assert (ours - nearest).abs().max() <= 0.05 * largest


def test_outputs_are_those_of_the_dequantised_weights(base):
    student, dense = student_of(base)
    torch.testing.assert_close(logits(student), logits(dense), rtol=1e-5, atol=1e-5)
    assert (logits(dense) - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 1e-2


@pytest.mark.plain("{}", "{'rslora': True}")
@pytest.mark.parametrize("more", [{}, {"dora": True}, {"rslora": True}, {"head": True}], ids=str)
def test_gradients_of_adapters_are_those_over_the_dequantised_weights(base, more):
    student, dense = student_of(base, **more)
    for model in (student, dense):
        model.train()(IDS, labels=IDS).loss.backward()
    theirs = adapters_of(dense)
    trained = {name: p for name, p in student.named_parameters() if p.requires_grad}
    assert trained.keys() == theirs.keys() and trained
    for name, weight in trained.items():
        torch.testing.assert_close(weight.grad, theirs[name].grad, rtol=1e-4, atol=1e-6, msg=name)


def test_an_evaluation_leaves_the_weights_as_they_are(base):
    """Some CPUs would repack them for kernels without a backward."""
    student, _ = student_of(base)
    before = fingerprint(student)
    logits(student.eval())
    student.train()(IDS, labels=IDS).loss.backward()
    assert fingerprint(student) == before
    assert all(p.grad is not None and p.grad.any() for p in adapters_of(student).values())


def test_sizes_are_those_of_a_dense_model(base):
    student, dense = student_of(base)
    assert parameters_of(student) == parameters_of(dense)
    assert count_flops(student, trains=True) == count_flops(dense, trains=True)


# ---------------------------------------------------------------- runs


def trained(name, *overrides, **more):
    return run(run_recipe(*IN_4_BITS, *overrides), name=name, **more)


def test_a_run_trains_saves_and_resumes_to_the_bit(workplace, capsys):
    result = trained("whole", "train.save_every=2", "train.steps=4", "train.schedule=constant")
    assert result.after.forward_kl < 0.9 * result.before.forward_kl
    assert "quantised   linear layers of the student by nf4" in capsys.readouterr().out
    folder = result.folder
    adapter = load_file(folder / "adapter/adapter_model.safetensors")
    shutil.rmtree(folder / "student")
    shutil.rmtree(folder / "checkpoint-4")
    (folder / "result.json").unlink()
    trained("whole", "train.save_every=2", "train.steps=4", "train.schedule=constant", resume=True)
    again = load_file(folder / "adapter/adapter_model.safetensors")
    assert adapter.keys() == again.keys() and all(torch.equal(adapter[name], again[name]) for name in adapter)


@pytest.mark.full
def test_the_merged_student_is_what_was_trained(workplace, tmp_path):
    """From the run, from its checkpoint, and from an adapter that was saved alone."""
    folder = trained("both", "train.save_every=6").folder
    alone = trained("alone", "student.lora.save=adapter").folder
    student = load_student(Student(model="student", dtype="nf4", lora=Lora(**LORA)))
    dense = load_and_merge(student.unload(), str(folder / "adapter"))
    assert not is_in_4_bits(dense) and dense.lm_head.weight is dense.model.embed_tokens.weight
    expected = logits(dense.eval())
    for name, source in (("run", folder), ("step", folder / "checkpoint-6"), ("adapter", alone)):
        assert run_command(["export", str(source), "-o", name, "--dtype", "float32"]) == 0
        handed = AutoModelForCausalLM.from_pretrained(name)
        assert handed.config.tie_word_embeddings and not hasattr(handed.config, "quantization_config")
        torch.testing.assert_close(logits(handed), expected, rtol=1e-5, atol=1e-5)
    in_16_bits = AutoModelForCausalLM.from_pretrained("student")
    assert (logits(load_and_merge(in_16_bits, str(folder / "adapter"))) - expected).abs().max() > 1e-2


def test_merging_leaves_the_student_as_it_is(base):
    student, dense = student_of(base)
    before = logits(student.eval())
    plain = merged(student)
    torch.testing.assert_close(logits(plain.eval()), logits(dense.eval()), rtol=1e-4, atol=1e-4)
    assert is_in_4_bits(student) and torch.equal(logits(student), before)


RUNS = {
    "teacher too": ["teacher.dtype=nf4"],
    "random weights": [
        "teacher={init: random, config: teacher, dtype: nf4}",
        "student={init: random, config: student, dtype: nf4, lora: {r: 4}}",
        "data.source=synthetic",
    ],
    "cut from a teacher": ["student={from_teacher: {layers: 2}, dtype: nf4, lora: {r: 4}}"],
    "more tokens": ["student.vocabulary=extend", "teacher.model=other"],
    "computed again in the backward": ["train.gradient_checkpointing=true", "student.lora.dropout=0.1"],
    "bfloat16": ["train.precision=bfloat16"],
}


@pytest.mark.full
@pytest.mark.parametrize("overrides", RUNS.values(), ids=RUNS.keys())
def test_other_runs_learn(workplace, overrides):
    result = trained("tiny", *overrides)
    assert result.after.forward_kl < result.before.forward_kl
    assert not is_in_4_bits(AutoModelForCausalLM.from_pretrained(result.folder / "student"))


@pytest.mark.parametrize("merge", [True, False])
def test_a_teacher_with_an_adapter(base, tmp_path, merge):
    """Merged before it is quantised, or beside weights in 4 bits."""
    adapted = add_lora(AutoModelForCausalLM.from_pretrained(base), Lora(**LORA), seed=0)
    with torch.no_grad():
        for weight in adapters_of(adapted).values():
            weight.normal_(std=0.1)
    save_adapter(adapted, tmp_path / "adapter")
    expected = logits(merged(adapted).eval())
    section = LocalTeacherConfig(model=base, dtype="nf4", adapter=str(tmp_path / "adapter"), merge_adapter=merge)
    teacher = load_teacher(section)
    assert is_in_4_bits(teacher) and not any(p.requires_grad for p in teacher.parameters())
    without = logits(load_teacher(LocalTeacherConfig(model=base, dtype="nf4")))
    ours = logits(teacher)
    assert (ours - expected).norm() < 0.5 * (without - expected).norm()


VARIANTS = {
    "rslora": ("auto", {"rslora": True}),
    "dora": ("auto", {"dora": True}),
    "pissa": ("auto", {"init": "pissa"}),
    "rslora over nf4": ("nf4", {"rslora": True}),
    "dora over nf4": ("nf4", {"dora": True}),
}


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "more"), VARIANTS.values(), ids=VARIANTS.keys())
def test_variants_of_adapters_are_resumed_and_merged(workplace, dtype, more):
    """Held against PEFT, which loads the adapter over the base that it was trained on."""
    student = f"student={{model: student, dtype: {dtype}, lora: {json.dumps(LORA | more)}}}"
    result = trained("whole", student, "train.save_every=2", "train.steps=4", "train.schedule=constant")
    assert result.after.forward_kl < result.before.forward_kl
    merged_student = AutoModelForCausalLM.from_pretrained(result.folder / "student")
    base = load_teacher(LocalTeacherConfig(model="student", dtype=dtype))
    base = dequantise_nf4(base, "cpu") if dtype == "nf4" else base
    with_adapter = PeftModel.from_pretrained(base, result.folder / "adapter")
    torch.testing.assert_close(logits(merged_student), logits(with_adapter.eval()), rtol=1e-4, atol=1e-4)
    adapter = load_file(result.folder / "adapter/adapter_model.safetensors")
    shutil.rmtree(result.folder / "student")
    shutil.rmtree(result.folder / "checkpoint-4")
    (result.folder / "result.json").unlink()
    trained("whole", student, "train.save_every=2", "train.steps=4", "train.schedule=constant", resume=True)
    again = load_file(result.folder / "adapter/adapter_model.safetensors")
    assert all(torch.equal(adapter[name], again[name]) for name in adapter)


# ---------------------------------------------------------------- plans


@pytest.mark.full
def test_an_8b_student_in_4_bits_fits_24_gb():
    """By arithmetic: 6.98 G linear weights of 4.127 bits, and 1.05 G of 16 bits."""
    card = find_device("24GB")
    recipe = load(find_recipe("llama3-8b-nf4-lora"))
    report = check_run(recipe, card, read_data=False)
    assert report.fits and report.memory.peak < 20 * 2**30
    linear = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    weights = linear * 4.127 / 8 + (8_030_261_248 - linear) * 2
    assert report.memory.parts["teacher"] == pytest.approx(weights, rel=1e-3)
    dense = check_run(load(find_recipe("llama3-8b-nf4-lora"), ["student.dtype=bfloat16"]), card, read_data=False)
    assert not dense.fits


def test_without_bitsandbytes_the_command_to_install_it_is_named(base, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"student\.dtype: nf4 needs bitsandbytes, which is not installed; install it"):
        load_student(Student(model=base, dtype="nf4", lora=Lora()))


def test_a_run_is_not_told_of_kernels_of_the_hub():
    """A CPU with bfloat16 instructions makes bitsandbytes warn at its import, which PEFT does in every run."""
    silence_libraries()
    module = importlib.import_module("bitsandbytes.backends.cpu.ops")
    assert not module.logger.isEnabledFor(logging.WARNING)


def test_a_run_is_not_told_of_the_config_that_no_gguf_file_has(base, tmp_path, monkeypatch):
    """PEFT looks for it in the file's folder at each checkpoint."""
    student = load_student(Student(model=base, lora=Lora()))
    monkeypatch.setattr(student.peft_config["default"], "base_model_name_or_path", str(tmp_path / "no-config"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        save_adapter(student, tmp_path / "told")
        silence_libraries()
        save_adapter(student, tmp_path / "not-told")
    assert len([warning for warning in seen if "Could not find a config file" in str(warning.message)]) == 1
