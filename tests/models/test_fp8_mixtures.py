"""An fp8 teacher that is a mixture: its experts quantised, beside transformers' eager experts on rounded numbers."""

import copy
import gc
import weakref

import pytest
import torch
from distill_kernels.matmul.fp8 import FP8, Fp8Linear
from distill_kernels.matmul.fp8_experts import Fp8Experts
from helpers import relative_error
from test_trainer import rows
from tiny import save_tiny, tiny_model
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from distill.data.collator import Collator
from distill.models.fp8_teacher import expert_weights, load_a_layer_at_a_time, quantise_teacher
from distill.models.load.fingerprint import fingerprint
from distill.models.loading import load_teacher
from distill.models.patch.experts import looks_like_experts
from distill.models.patch.patching import patch, unpatch
from distill.models.quantised_checkpoints import is_quantised
from distill.recipe import LocalTeacherConfig
from distill.teachers.backends.fp8 import Before, fp8_offers, quantise_and_measure
from distill.teachers.backends.local import LoadedTeacher
from distill.teachers.objective import DistillationObjective
from scripts.families import checks

FAMILIES = {  # what holds the weights' outputs: their columns in gpt-oss, else their rows
    "deepseek_v3": -1,
    "ernie4_5_moe": -1,
    "glm4_moe": -1,
    "gpt_oss": -2,
    "granitemoe": -1,
    "minimax_m2": -1,
    "mixtral": -1,
    "olmoe": -1,
    "phimoe": -1,
    "qwen3_moe": -1,
    "qwen3_next": -1,
}


def rounded(values, inputs):
    """Return numbers in fp64, each of e4m3 times one scale for the dimension `inputs`."""
    scale = values.abs().amax(inputs, keepdim=True).clamp(min=1e-300) / 448
    return (values / scale).float().to(FP8).double() * scale


class RoundedInputs(TorchFunctionMode):
    """Rounds the first operand of every product as fp8 does, a scale a row."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in ("linear", "matmul", "__matmul__", "mm"):
            args = (rounded(args[0], -1), *args[1:])
        return function(*args, **(kwargs or {}))


def mixture(name, seed=0):
    return checks.random_model(name, seed, scale=2).requires_grad_(False)


def experts_of(model):
    return [module for module in model.modules() if looks_like_experts(module)]


@pytest.mark.plain("deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe")
@pytest.mark.parametrize("name", FAMILIES)
def test_experts_compute_what_the_familys_own_do_on_rounded_numbers(name):
    model = mixture(name)
    exact = copy.deepcopy(model).double()
    assert quantise_teacher(model)
    ours = [module for module in model.modules() if isinstance(module, Fp8Experts)]
    assert len(ours) == len(experts_of(exact)) and not experts_of(model)
    generator = torch.Generator().manual_seed(1)
    for quantised, plain in zip(ours, experts_of(exact), strict=True):
        plain.config = copy.copy(plain.config)
        plain.config._experts_implementation = "eager"
        for weight in (plain.gate_up_proj, plain.down_proj):
            weight.copy_(rounded(weight, FAMILIES[name]))
        x = torch.randn(19, quantised.hidden_size, generator=generator) * 3
        weights, index = torch.rand(19, quantised.num_experts, generator=generator).topk(2)
        with RoundedInputs():
            expected = plain(x.double(), index, weights.double())
        assert relative_error(quantised(x, index, weights).double(), expected) < 1e-5


def test_a_layer_is_computed_by_its_shared_experts_too():
    """DeepSeek's shared experts are linear layers, which are in fp8 beside the routed ones; routers are not."""
    model = mixture("deepseek_v3")
    quantise_teacher(model)
    layer = next(module for module in model.modules() if hasattr(module, "shared_experts"))
    assert isinstance(layer.experts, Fp8Experts) and not isinstance(layer.gate, Fp8Linear)
    assert all(type(module) is Fp8Linear for module in layer.shared_experts.children() if hasattr(module, "weight"))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_the_cost_is_measured_whether_patched_or_not(name):
    """The divergence is one of quantisation: the same within rounding on our passes, small, and not of nothing."""
    batch = Collator(pad_token_id=2)([rows(4)[index] for index in range(4)])
    student = tiny_model(seed=2)
    found = []
    for patched in (True, False):
        teacher = mixture(name)
        if patched:
            patch(teacher, "teacher", attention=None, log_it=False)
        objective = DistillationObjective(teacher, student)
        cost = quantise_and_measure(teacher, objective.teacher.format, batch, student, objective.alignment)
        assert cost.experts == sum(isinstance(module, Fp8Experts) for module in teacher.modules()) > 0
        assert f"linear layers and the experts of {cost.experts} layers in fp8" in str(cost)
        assert 1e-6 < cost.teacher_kl < 0.3 * cost.student_kl
        found.append(cost.teacher_kl)
    assert found[0] == pytest.approx(found[1], rel=0.05)


@pytest.mark.parametrize("patched", [False, True])
def test_experts_in_16_bits_are_given_back_one_layer_after_another(patched):
    """Also those whose forward was ours, at once: the patch's list of modules must not keep them."""
    model = mixture("qwen3_moe")
    if patched:
        patch(model, "teacher", attention=None, log_it=False)
    before = [weakref.ref(module.gate_up_proj) for module in experts_of(model)]
    alive = []

    class Counting(TorchDispatchMode):
        """Counts what is left of them whenever some experts are quantised."""

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.distill.quantize_rows.default:
                done = sum(isinstance(module, Fp8Experts) for module in model.modules())
                alive.append(done + sum(weight() is not None for weight in before))
            return function(*args, **(kwargs or {}))

    gc.collect()
    gc.disable()
    try:
        with Counting():
            quantise_teacher(model)
        assert max(alive) <= len(before) + 1 and not any(weight() for weight in before)
    finally:
        gc.enable()
    if patched:
        ids = torch.arange(3, 12)[None]
        expected = model(input_ids=ids, use_cache=False).logits
        unpatch(model)
        assert relative_error(model(input_ids=ids, use_cache=False).logits, expected) < 0.02


@pytest.mark.plain("[]")
@pytest.mark.parametrize("skip", [[], ["1.mlp"], [0, "2.mlp.experts"]])
def test_a_mixture_quantised_layer_by_layer_is_the_same(tmp_path, skip):
    section = LocalTeacherConfig(model=str(save_tiny(tmp_path, mixture("qwen3_moe"))), dtype="fp8", fp8_skip=skip)
    whole = load_teacher(section, dtype=torch.float32)
    count = len(experts_of(whole))
    bytes_before = sum(p.numel() for module in experts_of(whole) for p in module.parameters())
    planned = expert_weights(whole, section.fp8_skip)
    quantise_teacher(whole, section.fp8_skip)
    left = experts_of(whole)
    assert len(left) == len(skip) and count > len(left)
    assert planned == bytes_before - sum(p.numel() for module in left for p in module.parameters())
    ours = load_a_layer_at_a_time(section, device=torch.device("cpu"), dtype=torch.float32)
    assert is_quantised(ours) and fingerprint(ours) == fingerprint(whole)
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        expected = whole(input_ids=ids, use_cache=False).logits
        assert torch.equal(ours(input_ids=ids, use_cache=False).logits, expected)
        report = patch(ours, "teacher", attention=None, log_it=False)  # as a run does it
        assert report.swapped["router"] == count
        error = relative_error(ours(input_ids=ids, use_cache=False).logits, expected)
    assert error < 0.02


def test_experts_of_another_kind_stay_and_are_named(caplog):
    model = mixture("qwen3_moe")
    for module in experts_of(model):
        module.act_fn = torch.nn.ReLU()
    count = len(experts_of(model))
    quantise_teacher(model)
    assert len(experts_of(model)) == count and "Qwen3MoeExperts stay in 16 bits" in caplog.text
    llama = mixture("llama4_text")  # whose experts are given tokens alone: known beforehand, by `check` as well
    assert expert_weights(llama) == 0


def test_suggested_parts_hold_the_experts():
    teacher = mixture("mixtral")
    loaded = LoadedTeacher(copy.deepcopy(teacher))
    batch = Collator(pad_token_id=2)([rows(4)[index] for index in range(2)])
    offers = fp8_offers(loaded.model, loaded.hidden, batch)
    everything = offers[-1]
    assert everything.kl == pytest.approx(0, abs=1e-6)
    assert everything.weights > expert_weights(teacher) > 0.5 * everything.weights
    fresh = LoadedTeacher(copy.deepcopy(teacher))
    before = Before(fresh.model, fresh.hidden, batch)
    quantise_teacher(fresh.model, offers[1].skip)
    assert before.moved() == offers[1].kl
