"""An fp8 teacher: its linear layers quantised, its head kept, and the divergence that costs measured exactly."""

import copy
import json
import re
import weakref

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from distill_kernels.matmul.fp8 import Fp8Linear, fp8_rms_norm, swap_linears_for_fp8
from test_trainer import rows
from tiny import save_tiny, tiny_model, tiny_tokenizer
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from distill.cli import run_command
from distill.data.collator import Collator
from distill.models.fp8_teacher import load_a_layer_at_a_time, quantise_teacher
from distill.models.load.fingerprint import fingerprint
from distill.models.loading import load_teacher
from distill.models.patch import recognition
from distill.models.patch.patching import patch
from distill.models.quantised_checkpoints import is_quantised
from distill.recipe import LocalTeacherConfig, parse
from distill.teachers.backends.fp8 import Before, Fp8Teacher, fp8_offers, quantise_and_measure
from distill.teachers.backends.local import LoadedTeacher
from distill.teachers.objective import DistillationObjective


def test_the_reported_divergences_are_those_of_the_logits():
    teacher, student = tiny_model(seed=1, hidden=64), tiny_model(seed=2)
    objective = DistillationObjective(teacher, student)
    batch = Collator(pad_token_id=2)([rows(4)[index] for index in range(4)])
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
    keep = batch["valid_rows"]

    def log_p(model):
        with torch.no_grad():
            return model(**inputs).logits.double().flatten(0, 1)[keep].log_softmax(-1)

    before, of_student = log_p(teacher), log_p(student)
    report = quantise_and_measure(teacher, objective.teacher.format, batch, student, objective.alignment)
    after = log_p(teacher)
    linears = [module for module in teacher.modules() if isinstance(module, Fp8Linear)]
    assert len(linears) == report.layers == 14
    assert type(teacher.lm_head) is torch.nn.Linear

    def kl(p, q):
        return F.kl_div(q, p, log_target=True, reduction="batchmean").item()

    assert report.teacher_kl == pytest.approx(kl(before, after), rel=1e-4)
    assert report.student_kl == pytest.approx(kl(before, of_student), rel=1e-4)
    assert 1e-5 < report.teacher_kl < 0.2 * report.student_kl


def test_a_patched_teacher_quantises_within_its_mlps(watch):
    teacher, ids = tiny_model(seed=1, hidden=64), torch.arange(12)[None]
    swap_linears_for_fp8(teacher)
    patch(teacher, "teacher", attention=None)
    made, forward_gated = [], Fp8Linear.forward_gated
    watch.setattr(Fp8Linear, "forward_gated", lambda *args: made.append(args[3]) or forward_gated(*args))

    def logits():
        made.clear()
        with torch.no_grad():
            return teacher(ids).logits

    ours, down = logits(), teacher.model.layers[0].mlp.down_proj
    assert made == ["silu"] * len(teacher.model.layers)
    hook = down.register_forward_pre_hook(lambda module, args: None)  # somebody's, which must be called
    assert torch.equal(logits(), ours) and len(made) == len(teacher.model.layers) - 1
    hook.remove()


def test_a_patched_teacher_quantises_within_its_norms(watch):
    teacher, ids = tiny_model(seed=1, hidden=64), torch.arange(12)[None]
    swap_linears_for_fp8(teacher, keep=["lm_head", "0.mlp.up_proj"])  # of the first MLP one product stays as it is
    patch(teacher, "teacher", attention=None)
    made, layer = [], teacher.model.layers[1]
    noted = lambda *args: made.append(args[4] is not None) or fp8_rms_norm(*args)  # noqa: E731
    watch.setattr(recognition, "fp8_rms_norm", noted)

    def logits():
        made.clear()
        with torch.no_grad():
            return teacher(ids).logits

    ours = logits()
    assert made == [False, False, True]
    seen = []
    hook = layer.self_attn.q_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0] * 1))
    assert torch.equal(logits(), ours) and 0.5 < seen[0].std() < 2  # a hook sees numbers
    hook.remove()
    layer.input_layernorm.bfloat16()  # a norm that writes another dtype than it reads
    assert logits() is not None and made == [False, True]
    layer.input_layernorm.float()
    add_hook_to_module(layer.self_attn.o_proj, ModelHook())  # accelerate's, which may move what a layer is given
    assert torch.equal(logits(), ours) and made == [False, True]
    remove_hook_from_module(layer.self_attn.o_proj)
    with torch.inference_mode():
        assert torch.equal(teacher(ids).logits, ours)
    made.clear()
    with torch.enable_grad():
        assert torch.equal(teacher.requires_grad_(False)(ids).logits, ours) and not made


def test_at_most_one_module_of_a_teacher_is_held_twice():
    """Layers in 16 bits are given back one after another, not when the last one is quantised."""
    teacher = tiny_model(seed=1, hidden=64, layers=5)
    patch(teacher, "teacher", attention=None)
    before = [weakref.ref(module.weight) for module in teacher.modules() if isinstance(module, torch.nn.Linear)]
    twice = []

    class Counting(TorchDispatchMode):
        """Looks at the teacher whenever a weight is quantised."""

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.distill.quantize_rows.default:
                done = sum(isinstance(module, Fp8Linear) for module in teacher.modules())
                twice.append(done - sum(weight() is None for weight in before))
            return function(*args, **(kwargs or {}))

    with Counting():
        assert quantise_teacher(teacher) == len(twice) == 5 * 7
    assert max(twice) <= 3, twice


def test_training_continues_with_the_quantised_teacher():
    teacher, student = tiny_model(seed=1, hidden=64), tiny_model(seed=2)
    objective = DistillationObjective(Fp8Teacher(teacher), student)
    batch = Collator(pad_token_id=2)([rows(4)[index] for index in range(4)])
    exact = student(**objective.student_inputs(batch))["loss"].item()
    (line,) = objective.teacher.validate_first_batch(batch, student, objective.alignment)
    loss = student(**objective.student_inputs(batch))["loss"]
    loss.backward()
    assert loss.item() != exact and abs(loss.item() - exact) < 0.2 * exact
    assert student.model.layers[0].mlp.up_proj.weight.grad.abs().max() > 0
    assert line.startswith("fp8") and f"beside KL(teacher, student) {exact:.4f}" in line


@pytest.mark.parametrize(
    "skip, count", [([], 21), ([0, "2.mlp", "1.self_attn.q_proj"], 10), (["1.mlp", "1.self_attn"], 14)]
)
def test_a_teacher_quantised_layer_by_layer_is_the_same(tmp_path, skip, count):
    section = LocalTeacherConfig(
        model=str(save_tiny(tmp_path, tiny_model(layers=3, hidden=64))), dtype="fp8", fp8_skip=skip
    )
    whole = load_teacher(section, dtype=torch.float32)
    assert not is_quantised(whole)
    assert quantise_teacher(whole, section.fp8_skip) == count
    ours = load_a_layer_at_a_time(section, device=torch.device("cpu"), dtype=torch.float32)
    assert is_quantised(ours) and type(ours.lm_head) is torch.nn.Linear
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        assert torch.equal(ours(input_ids=ids).logits, whole(input_ids=ids).logits)


@pytest.mark.parametrize("tied", [False, True])
def test_random_weights_are_initialised_layer_by_layer(tmp_path, tied):
    """Neither host nor device ever holds the whole teacher."""
    tiny_model(layers=3, hidden=64, tie_word_embeddings=tied).config.save_pretrained(tmp_path)
    section = LocalTeacherConfig(init="random", config=str(tmp_path))
    ours, again = (load_a_layer_at_a_time(section, device=torch.device("cpu"), dtype=torch.float32) for _ in range(2))
    assert is_quantised(ours) and not any(weight.is_meta or weight.requires_grad for weight in ours.parameters())
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied
    assert ours.lm_head.weight.std() == pytest.approx(ours.config.initializer_range, rel=0.05)
    whole = load_teacher(section, dtype=torch.float32)
    for name, weight in whole.named_parameters():
        if name.endswith(("norm.weight", "embed_tokens.weight")):
            drawn = ours.get_parameter(name)
            assert drawn.mean() == pytest.approx(weight.mean().item(), abs=2e-3), name
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        logits = ours(input_ids=ids).logits
        assert torch.equal(logits, again(input_ids=ids).logits) and logits.isfinite().all()
        assert logits.std() == pytest.approx(whole(input_ids=ids).logits.std().item(), rel=0.5)


@pytest.mark.parametrize("gib, alone", [(140, False), (20, False), (18, True)])
def test_layerwise_loading_only_where_the_teacher_does_not_fit(monkeypatch, gib, alone):
    """8B in bfloat16 beside a 1B student in bfloat16: 15.0 + 2.3 GiB."""
    from types import SimpleNamespace

    from distill.models.dtypes import resolve_precision
    from distill.models.patch.attention_choice import AttentionChoices
    from distill.models.sharding import SINGLE_PROCESS
    from distill.teachers.backends import local as model
    from distill.teachers.load_context import LoadContext

    ways = []
    for module, name in ((model, "load_a_layer_at_a_time"), (model, "load_teacher")):
        monkeypatch.setattr(module, name, lambda *given, name=name, **more: ways.append(name))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=gib * 2**30))
    recipe = parse(
        """
        teacher: {init: random, config: llama-3.1-8b, dtype: fp8}
        student: {init: random, config: llama-3.2-1b, dtype: bfloat16}
        data: {source: synthetic, max_length: 64}
        train: {steps: 1}
        """
    )
    for device in (torch.device("cuda", 0), torch.device("cpu")):
        context = LoadContext(device, resolve_precision(recipe, device), SINGLE_PROCESS, AttentionChoices(recipe))
        model.LocalPlan(recipe).load(context)
    assert ways == ["load_a_layer_at_a_time" if alone else "load_teacher", "load_teacher"]


def in_fp8(model):
    return {name for name, module in model.named_modules() if isinstance(module, Fp8Linear)}


def test_excluded_layers_are_unchanged():
    teacher = tiny_model(layers=12, hidden=64)
    every = in_fp8(copy.deepcopy(swap(teacher)))
    quantise_teacher(teacher, ["1", "10.mlp"])
    left = every - in_fp8(teacher)
    assert {name.split(".")[2] for name in left} == {"1", "10"} and len(left) == 7 + 3
    assert all(".1." in name or ".mlp." in name for name in left)


def swap(model):
    model = copy.deepcopy(model)
    swap_linears_for_fp8(model)
    return model


@pytest.mark.parametrize("part", ["2", "0.mpl", "0.mlp.7", "1.input_layernorm"])
def test_a_part_that_the_model_has_not_is_refused(part):
    with pytest.raises(
        ValueError, match=r"teacher.fp8_skip: expected layers 0 to 1, .* 0.self_attn, 0.mlp; got " + part
    ):
        quantise_teacher(tiny_model(hidden=64), [part])


def test_the_setting_has_one_spelling():
    section = LocalTeacherConfig(model="a", dtype="fp8", fp8_skip=[29, "3.mlp", "29"])
    assert section.fp8_skip == ["3.mlp", "29"] and section.held == "fp8 but 3.mlp 29"
    assert LocalTeacherConfig(model="a", dtype="fp8").held == "fp8"
    for wrong in ({"dtype": "bfloat16", "fp8_skip": [1]}, {"dtype": "fp8", "fp8_skip": ["mlp"]}):
        with pytest.raises(ValueError, match="fp8_skip"):
            LocalTeacherConfig(model="a", **wrong)


def test_suggested_settings_match_a_run_with_them():
    """Each of them, to the bit; the part that alone moves the teacher most a weight is left out first."""
    teacher = tiny_model(layers=3, hidden=64, seed=1)
    batch = Collator(pad_token_id=2)([rows(4)[index] for index in range(4)])

    def moved(skip):
        fresh = LoadedTeacher(copy.deepcopy(teacher))
        before = Before(fresh.model, fresh.hidden, batch)
        quantise_teacher(fresh.model, skip)
        left = [m for name, m in fresh.model.named_modules() if type(m) is torch.nn.Linear and name != "lm_head"]
        return before.moved(), sum(linear.weight.numel() for linear in left)

    loaded = LoadedTeacher(copy.deepcopy(teacher))
    offers = fp8_offers(loaded.model, loaded.hidden, batch, lambda run: float(run() is not None))
    assert [len(offer.skip) for offer in offers] == [0, 1, 2, 4, 6] and {offer.ms for offer in offers} == {1.0}
    for offer in offers[:-1]:
        assert moved(offer.skip) == (offer.kl, offer.weights)
    everything = offers[-1]
    assert everything.kl == pytest.approx(0, abs=1e-6) and everything.weights == 3 * (12288 + 24576)
    alone = {part: moved([other for other in everything.skip if other != part]) for part in everything.skip}
    price = {part: kl / (everything.weights - left) for part, (kl, left) in alone.items()}
    assert offers[1].skip == (max(price, key=price.get),) and offers[1].kl < 0.6 * offers[0].kl


def test_the_search_evaluates_each_part_about_once():
    teacher = tiny_model(layers=6, hidden=64)
    loaded, calls = LoadedTeacher(teacher), []
    teacher.model.register_forward_hook(lambda *_: calls.append(1))
    fp8_offers(teacher, loaded.hidden, Collator(pad_token_id=2)([rows(2)[0]]))
    assert len(calls) <= 2 * 6 + 8


def test_fingerprints_see_the_weights_in_fp8():
    one, other = tiny_model(hidden=64), tiny_model(hidden=64)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight[3, 3] += 1
    marks = {fingerprint(swap(one)), fingerprint(swap(other)), fingerprint(one)}
    quantise_teacher(one, ["1"])
    assert len(marks | {fingerprint(one)}) == 4


@pytest.mark.full
def test_probe_reports_fp8_error_without_a_gpu(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "teacher", tiny_model(tiny_tokenizer(), hidden=64), tiny_tokenizer())
    (tmp_path / "text.txt").write_text("\n".join(f"line {i} of some text to learn" for i in range(100)))
    (tmp_path / "mine.yaml").write_text(
        "{teacher: {model: teacher}, student: {from_teacher: {layers: 1}}, data: {source: text.txt, max_length: 32, "
        "cache: false}, train: {steps: 2, batch_size: 2}}"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = ["check", "mine.yaml", "--probe", "--gpu", "H100", "teacher.dtype=fp8"]
    assert run_command(asked) == 0
    shown = capsys.readouterr().out
    assert "ms per micro-batch (estimated)" in shown and "one step here" not in shown
    assert re.search(r"KL 0\.\d{4} to 0\.\d{4} for \d+\.\d+ ms: teacher\.fp8_skip=\[\d\.(mlp|self_attn)\]\n", shown)
    setting = shown.split("ms: ")[1].split("\n")[0]
    assert run_command([*asked, setting, "--json"]) == 0
    first, *_ = json.loads(capsys.readouterr().out)["fp8"]
    assert first["weights"] == 0 and first["longer_ms"] == 0
    assert run_command([*asked[:-1], "teacher.dtype=fp8", "teacher.fp8_skip=[99]"]) == 2
    assert "teacher.fp8_skip: expected layers 0 to" in capsys.readouterr().err
