"""An fp8 teacher: its linear layers quantised, its head kept, and the divergence that costs measured exactly."""

import pytest
import torch
from distill_kernels.matmul.fp8 import Fp8Linear, swap_linears_for_fp8
from test_trainer import rows
from tiny import save_tiny, tiny_model
from torch.nn import functional as F

from distill.data.collator import Collator
from distill.models.fp8_teacher import is_quantised, load_a_layer_at_a_time
from distill.models.load import load_teacher
from distill.recipe import RecipeError, Teacher, parse
from distill.teachers.fp8_cost import quantise_and_measure
from distill.teachers.model import LoadedTeacher
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
    report = quantise_and_measure(teacher, objective.teacher.format, batch, student, objective.pairing)
    after = log_p(teacher)
    linears = [module for module in teacher.modules() if isinstance(module, Fp8Linear)]
    assert len(linears) == report.layers == 14
    assert type(teacher.lm_head) is torch.nn.Linear

    def kl(p, q):
        return F.kl_div(q, p, log_target=True, reduction="batchmean").item()

    assert report.teacher_kl == pytest.approx(kl(before, after), rel=1e-4)
    assert report.student_kl == pytest.approx(kl(before, of_student), rel=1e-4)
    assert 1e-5 < report.teacher_kl < 0.2 * report.student_kl


def test_training_goes_on_against_the_quantised_teacher():
    teacher, student = tiny_model(seed=1, hidden=64), tiny_model(seed=2)
    objective = DistillationObjective(LoadedTeacher(teacher, fp8=True), student)
    batch = Collator(pad_token_id=2)([rows(4)[index] for index in range(4)])
    exact = student(**objective.compare(batch))["loss"].item()
    (line,) = objective.teacher.prove(batch, student, objective.pairing)
    loss = student(**objective.compare(batch))["loss"]
    loss.backward()
    assert loss.item() != exact and abs(loss.item() - exact) < 0.2 * exact
    assert student.model.layers[0].mlp.up_proj.weight.grad.abs().max() > 0
    assert line.startswith("fp8") and f"beside KL(teacher, student) {exact:.4f}" in line


def test_fp8_is_for_teachers():
    text = "teacher: {model: a, dtype: fp8}\nstudent: {model: b%s}\ndata: {source: c}\ntrain: {steps: 1}\n"
    assert parse(text % "").teacher.dtype == "fp8"
    with pytest.raises(RecipeError, match="fp8 is for teachers"):
        parse(text % ", dtype: fp8")


def test_a_teacher_quantised_layer_by_layer_is_the_same(tmp_path):
    section = Teacher(model=str(save_tiny(tmp_path, tiny_model(layers=3, hidden=64))))
    whole = load_teacher(section, dtype=torch.float32)
    assert not is_quantised(whole)
    swap_linears_for_fp8(whole)
    ours = load_a_layer_at_a_time(section, device=torch.device("cpu"), dtype=torch.float32)
    assert is_quantised(ours) and type(ours.lm_head) is torch.nn.Linear
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        assert torch.equal(ours(input_ids=ids).logits, whole(input_ids=ids).logits)


@pytest.mark.parametrize("tied", [False, True])
def test_random_weights_are_drawn_a_layer_at_a_time(tmp_path, tied):
    """Where they will lie: neither host nor device ever holds the whole teacher."""
    tiny_model(layers=3, hidden=64, tie_word_embeddings=tied).config.save_pretrained(tmp_path)
    section = Teacher(init="random", config=str(tmp_path))
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
def test_only_what_does_not_fit_whole_is_loaded_so(monkeypatch, gib, alone):
    """8B in bfloat16 beside a 1B student in bfloat16: 15.0 + 2.3 GiB."""
    from types import SimpleNamespace

    from distill.models.attention_choice import AttentionChoices
    from distill.models.precision import resolve_precision
    from distill.models.sharding import ALONE
    from distill.teachers import model
    from distill.teachers.base import OpenContext

    ways = []
    for name in ("load_a_layer_at_a_time", "load_teacher"):
        monkeypatch.setattr(model, name, lambda *given, name=name, **more: ways.append(name))
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
        context = OpenContext(device, resolve_precision(recipe, device), ALONE, AttentionChoices(recipe))
        model.ModelSource(recipe).load(context)
    assert ways == ["load_a_layer_at_a_time" if alone else "load_teacher", "load_teacher"]
