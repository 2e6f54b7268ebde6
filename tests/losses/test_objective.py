"""The objective against full logits: every kind of head, LoRA, padding, packing, and what must be refused."""

import copy

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from distill_kernels import Clip, FusedJSDLoss, FusedKLLoss, LossTerm
from helpers import relative_error
from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tiny import tiny_model
from torch import nn
from torch.nn import functional as F

from distill import patch, unpatch
from distill.data.collator import Collator
from distill.models.head import LogitTransform, find_head, probe_logits, read_head
from distill.objectives.losses import STATISTICS
from distill.teachers.objective import DistillationObjective

EXACT = 1e-9  # both sides in fp64
TWO_DOCUMENTS = {
    "input_ids": [5, 6, 7, 8, 9, 30, 31],
    "labels": [-100, 6, 7, -100, -100, 30, 31],
    "position_ids": [0, 1, 2, 3, 0, 1, 2],
}
ROWS = [
    TWO_DOCUMENTS,
    {"input_ids": [11, 12, 13, 14], "labels": [-100, -100, 13, 14], "position_ids": [0, 1, 2, 3]},
]
MIXED = {
    "temperature": 2.0,
    "terms": [{"type": "forward_kl", "weight": 0.7}, {"type": "cross_entropy", "weight": 0.4}],
}


def batch():
    return Collator(2)(ROWS)


def double(**settings):
    return tiny_model(dtype=torch.float64, **settings)


def reference(student, teacher, inputs, *, temperature=2.0, kl=0.7, ce=0.4, vocab=None):
    """The mixed loss from full logits, as one would write it down, and the number of trained tokens."""
    body = {key: inputs[key] for key in ("input_ids", "position_ids")}
    z_s = student(**body, use_cache=False).logits[:, :-1, :vocab]
    with torch.no_grad():
        z_t = teacher(**body, use_cache=False).logits[:, :-1, :vocab]
    labels = inputs["labels"][:, 1:]
    keep = labels != -100
    z_s, z_t, labels = z_s[keep], z_t[keep], labels[keep]
    log_s, log_t = F.log_softmax(z_s / temperature, -1), F.log_softmax(z_t / temperature, -1)
    divergence = (log_t.exp() * (log_t - log_s)).sum() * temperature**2
    return (kl * divergence + ce * F.cross_entropy(z_s, labels, reduction="sum")) / keep.sum(), keep.sum()


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_as_reference(student, teacher, objective, inputs, **settings):
    expected, _ = reference(student, teacher, inputs, **settings)
    wanted = gradients(student, expected)
    loss = student(**objective.student_inputs(inputs))["loss"]
    got = gradients(student, loss)
    torch.testing.assert_close(loss, expected, rtol=EXACT, atol=EXACT)
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=EXACT, atol=EXACT, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.plain("llama-True", "qwen2-True", "gemma2-True", "granite-False", "cohere-False", "gpt2-False")
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2", "granite", "cohere", "gpt2"])
def test_loss_and_gradients_equal_full_logits(kind, tie):
    more = (
        {"logits_scaling": 3.0} if kind == "granite" else {"final_logit_softcapping": 4.0} if kind == "gemma2" else {}
    )
    student, teacher = double(kind=kind, tie=tie, **more), double(kind=kind, hidden=64, layers=3, seed=1, **more)
    assert_same_as_reference(student, teacher, DistillationObjective(teacher, student, MIXED), batch())


def test_a_document_does_not_predict_the_next_ones_first_token():
    """The first labels of documents are masked in another collator's batch."""
    student, teacher = double(), double(seed=1)
    inputs = {name: tensor for name, tensor in batch().items() if name != "valid_rows"}
    learned = {**inputs, "labels": inputs["labels"].clone()}
    learned["labels"][:, 0], learned["labels"][0, 4] = 5, 9
    objective = DistillationObjective(teacher, student, MIXED)
    expected, _ = reference(student, teacher, inputs)
    torch.testing.assert_close(student(**objective.student_inputs(learned))["loss"], expected, rtol=EXACT, atol=EXACT)
    collated = Collator(2, padding_side="left")([{**row, "labels": row["input_ids"]} for row in ROWS])
    starts = collated["position_ids"] == 0
    assert starts[1].tolist() == [True, False, False, True, False, False, False]
    assert (collated["labels"][starts] == -100).all() and (collated["labels"][0][~starts[0]] != -100).all()
    assert collated["valid_rows"].tolist() == [0, 1, 2, 4, 5, 10, 11, 12]


def test_head_with_a_bias():
    student, teacher = double(tie=False), double(seed=1, tie=False)
    for model in (student, teacher):
        head = nn.Linear(32, 259, dtype=torch.float64)
        head.weight.data.copy_(model.lm_head.weight)
        model.lm_head = head
    assert_same_as_reference(student, teacher, DistillationObjective(teacher, student, MIXED), batch())


@pytest.mark.parametrize("when", ["before", "after"])
def test_lora_with_the_head(when):
    teacher, base = double(seed=1), double(tie=False)
    config = LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj", "lm_head"])
    if when == "before":
        objective = DistillationObjective(teacher, base, MIXED)
        student = get_peft_model(base, config)
    else:
        student = get_peft_model(base, config)
        objective = DistillationObjective(teacher, student, MIXED)
    for name, parameter in student.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    student.to(torch.float64)
    assert read_head(find_head(student)).lora[2] == pytest.approx(7 / 3)
    assert_same_as_reference(student, teacher, objective, batch())
    with student.disable_adapter():
        plain, _ = reference(base, teacher, batch())
        torch.testing.assert_close(student(**objective.student_inputs(batch()))["loss"], plain, rtol=EXACT, atol=EXACT)


def test_a_trained_copy_of_the_head():
    teacher, base = double(seed=1), double(tie=False)
    student = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])).double()
    with torch.no_grad():
        find_head(student).linear.weight.add_(0.1)
    assert find_head(student).linear.weight.requires_grad
    assert_same_as_reference(student, teacher, DistillationObjective(teacher, student, MIXED), batch())


def test_padded_vocabulary_is_cut():
    student, teacher = double(vocab_size=270), double(seed=1, vocab_size=264)
    objective = DistillationObjective(teacher, student, MIXED, vocab_size=259)
    assert_same_as_reference(student, teacher, objective, batch(), vocab=259)
    assert DistillationObjective(teacher, student, MIXED).alignment.vocab_size == 264
    with pytest.raises(ValueError, match="vocab_size"):
        DistillationObjective(teacher, student, MIXED, vocab_size=265)


def test_gradient_checkpointing_changes_nothing():
    student, teacher = double(), double(seed=1)
    objective = DistillationObjective(teacher, student, MIXED)
    plain = gradients(student, student(**objective.student_inputs(batch()))["loss"])
    student.gradient_checkpointing_enable({"use_reentrant": False})
    student.train()
    again = gradients(student, student(**objective.student_inputs(batch()))["loss"])
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=EXACT, atol=EXACT)


def test_packed_documents_equal_separate_ones():
    student, teacher = double(), double(seed=1)
    objective = DistillationObjective(teacher, student)
    whole = student(**objective.student_inputs(Collator(2)(ROWS[:1]), num_items=1))
    parts = [{key: values[here] for key, values in ROWS[0].items()} for here in (slice(0, 4), slice(4, 7))]
    sums = sum(student(**objective.student_inputs(Collator(2)([part]), num_items=1))["statistics"] for part in parts)
    torch.testing.assert_close(whole["statistics"], sums, rtol=1e-6, atol=1e-6)


def test_padding_and_masked_labels_change_nothing():
    student, teacher = double(), double(seed=1)
    objective = DistillationObjective(teacher, student, MIXED)
    loss = student(**objective.student_inputs(batch()))["loss"]
    for collator in (Collator(9, pad_to_multiple_of=16), Collator(2, padding_side="left")):
        other = student(**objective.student_inputs(collator(ROWS)))["loss"]
        torch.testing.assert_close(other, loss, rtol=EXACT, atol=EXACT)
    without_rows = {key: value for key, value in batch().items() if key != "valid_rows"}
    torch.testing.assert_close(student(**objective.student_inputs(without_rows))["loss"], loss, rtol=EXACT, atol=EXACT)
    changed = copy.deepcopy(ROWS)
    changed[1]["input_ids"][3] = 99  # the last token of a document: a label (masked below), never a context
    changed[1]["labels"][3] = -100
    masked = copy.deepcopy(ROWS)
    masked[1]["labels"][3] = -100
    a, b = (student(**objective.student_inputs(Collator(2)(rows)))["loss"] for rows in (changed, masked))
    torch.testing.assert_close(a, b, rtol=EXACT, atol=EXACT)


def test_labels_are_shifted_once():
    student, teacher = double(), double(seed=1)
    objective = DistillationObjective(teacher, student, "forward_kl")
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, -100], "position_ids": [0, 1, 2]}]
    statistics = student(**objective.student_inputs(Collator(2)(rows)))["statistics"]
    log_p = student(input_ids=torch.tensor([[5, 6, 7]])).logits[0, 0].log_softmax(-1)
    assert statistics[STATISTICS.index("student_label_logprob")].item() == pytest.approx(log_p[6].item(), abs=1e-5)


def test_a_model_against_itself_is_zero():
    teacher = double()
    objective = DistillationObjective(teacher, copy.deepcopy(teacher))
    output = objective._student(**objective.student_inputs(batch()))
    assert abs(output["loss"].item()) < 1e-12
    assert output["statistics"][STATISTICS.index("agreement")] == batch()["valid_rows"].numel()


def test_cross_entropy_alone_runs_no_teacher():
    student, teacher = double(), double(seed=1)
    objective = DistillationObjective(teacher, student, "cross_entropy")
    teacher.forward = teacher.model.forward = None
    loss = student(**objective.student_inputs(batch()))["loss"]
    expected, _ = reference(student, student, batch(), kl=0.0, ce=1.0)
    torch.testing.assert_close(loss, expected, rtol=EXACT, atol=EXACT)
    assert objective.divergence == (None, 1.0)


def test_hooks_of_body_norm_and_head_run_and_no_logits_are_made():
    student, teacher = double(), double(seed=1)
    objective = DistillationObjective(teacher, student)
    seen = []
    for name in ("model", "model.norm", "lm_head"):
        student.get_submodule(name).register_forward_pre_hook(lambda *_, n=name: seen.append(n))
        student.get_submodule(name).register_forward_hook(lambda *_, n=name: seen.append(n + " done"))
    student(**objective.student_inputs(batch()))
    assert seen == ["model", "model.norm", "model.norm done", "model done", "lm_head", "lm_head done"]
    assert "forward" not in student.lm_head.__dict__


def test_everything_else_works_as_before(tmp_path):
    student, teacher = tiny_model(), tiny_model(seed=1)
    ids = torch.tensor([[5, 6, 7]])
    before, keys = student.generate(ids, max_new_tokens=4), list(student.state_dict())
    objective = DistillationObjective(teacher, student)
    assert torch.equal(student.generate(ids, max_new_tokens=4), before)
    assert list(student.state_dict()) == keys and not any(p.requires_grad for p in teacher.parameters())
    student.save_pretrained(tmp_path)
    assert torch.equal(type(student).from_pretrained(tmp_path).generate(ids, max_new_tokens=4), before)
    copied = copy.deepcopy(student)
    copied.lm_head.weight.data.zero_()
    assert copied(**objective.student_inputs(batch()))["loss"] != student(**objective.student_inputs(batch()))["loss"]
    objective.detach()
    assert "forward" not in student.__dict__


ORDERS = [
    ("attach", "patch", "unpatch", "detach"),
    ("attach", "patch", "detach", "unpatch"),
    ("patch", "attach", "unpatch", "detach"),
    ("patch", "attach", "detach", "unpatch"),
    ("attach", "patch", "unpatch", "patch", "detach", "attach", "detach", "unpatch"),
]


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_kernels_and_objective_are_taken_back_in_any_order(order):
    """A model that is patched for any training loop has a forward of ours that the objective's stands upon."""
    student, teacher = tiny_model(), tiny_model(seed=1)
    ids, own = torch.tensor([[5, 6, 7, 8]]), dict(student.__dict__)
    expected = student(input_ids=ids, labels=ids).loss.item()
    other = DistillationObjective(teacher, student)
    divergence = student(**other.student_inputs(batch()))["loss"].item()
    other.detach()
    is_on = {"attach": False, "patch": False}
    for step in order:
        if step == "attach":
            objective = DistillationObjective(teacher, student)
        elif step == "detach":
            objective.detach()
        else:
            patch(student) if step == "patch" else unpatch(student)
        is_on[{"detach": "attach", "unpatch": "patch"}.get(step, step)] = step in is_on
        assert student(input_ids=ids, labels=ids).loss.item() == pytest.approx(expected, rel=1e-5)
        if is_on["attach"]:
            loss = student(**objective.student_inputs(batch()))["loss"]
            assert loss.item() == pytest.approx(divergence, rel=1e-5)
        assert ("forward" in student.model.norm.__dict__) is is_on["patch"]
    assert student.__dict__.keys() == own.keys() and "forward" not in student.model.layers[0].mlp.__dict__


def test_a_failing_loss_leaves_the_head_as_it_was():
    student, teacher = tiny_model(), tiny_model(seed=1)
    objective = DistillationObjective(teacher, student)
    broken = batch() | {"valid_rows": torch.zeros(3, 3)}
    with pytest.raises(ValueError):
        student(**objective.student_inputs(broken))
    assert "forward" not in student.lm_head.__dict__


@pytest.mark.parametrize(
    "loss, terms",
    [
        ("reverse_kl", [LossTerm("reverse_kl", 1.0)]),
        ({"terms": [{"type": "jsd", "beta": 0.3}]}, [LossTerm("jsd", 1.0, beta=0.3)]),
        (
            {"terms": [{"type": "jsd", "clip": {"entry": 0.05}}], "temperature": {"student": 1.1}},
            [LossTerm("jsd", 1.0, beta=0.5, clip=Clip(entry=0.05))],
        ),
        ([LossTerm("tvd", 2.0)], [LossTerm("tvd", 2.0)]),
        (FusedJSDLoss(beta=0.2), [LossTerm("jsd", 1.0, beta=0.2), LossTerm("cross_entropy", 0.0)]),
    ],
)
def test_ways_to_name_a_loss(loss, terms):
    objective = DistillationObjective(tiny_model(seed=1), tiny_model(), loss)
    assert list(objective.loss.terms) == terms


def test_a_loss_that_ignores_the_soft_cap_is_refused():
    student, teacher = tiny_model(), tiny_model(kind="gemma2", seed=1)
    with pytest.raises(ValueError, match=r"loss\.teacher_softcap: expected 30\.0 for these models, got 0\.0"):
        DistillationObjective(teacher, student, FusedKLLoss())


def test_an_unknown_loss_is_refused():
    with pytest.raises(ValueError, match="forward_kk"):
        DistillationObjective(tiny_model(seed=1), tiny_model(), "forward_kk")


def test_a_model_with_a_twist_between_head_and_logits_is_refused():
    model = tiny_model()
    original = type(model).forward

    def twisted(*args, **kwargs):
        output = original(model, *args, **kwargs)
        output.logits = output.logits * 1.25
        return output

    assert probe_logits(model, "student") == LogitTransform()
    model.forward = twisted
    with pytest.raises(ValueError, match="student: the logits of LlamaForCausalLM do not follow"):
        probe_logits(model, "student")


@pytest.fixture
def accelerate_anew():
    """Accelerate without what other tests have chosen for the process."""
    states = [AcceleratorState._shared_state, PartialState._shared_state]
    kept = [dict(state) for state in states]
    for state in states:
        state.clear()
    yield
    for state, before in zip(states, kept, strict=True):
        state.clear()
        state.update(before)


def test_a_model_that_a_trainer_has_prepared_for_autocast_is_read_in_its_own_precision(accelerate_anew):
    model = tiny_model(hidden=64)
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    assert prepared is model
    ids = torch.arange(4)[None]
    exact = type(model).forward(model, input_ids=ids, use_cache=False).logits
    assert not torch.equal(model(input_ids=ids, use_cache=False).logits, exact), "no autocast: nothing is tested"
    assert probe_logits(model, "student") == LogitTransform()
    assert not torch.equal(model(input_ids=ids, use_cache=False).logits, exact), "the autocast is gone"


def test_logits_scaling_that_multiplies_is_found_out():
    model = tiny_model()
    model.config.logits_scaling = 4.0
    original = type(model).forward

    def scaled(*args, **kwargs):
        output = original(model, *args, **kwargs)
        output.logits = output.logits * 4.0
        return output

    model.forward = scaled
    assert probe_logits(model, "student") == LogitTransform(4.0)


def test_heads_that_would_be_read_wrongly_are_refused():
    class Quantised(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    student = tiny_model(tie=False)
    student.lm_head = Quantised(32, 259, bias=False)
    with pytest.raises(ValueError, match=r"lm_head: expected a plain torch\.nn\.Linear, got .*\.Quantised"):
        read_head(find_head(student))
    student = get_peft_model(tiny_model(tie=False), IA3Config(target_modules=["lm_head"], feedforward_modules=[]))
    with pytest.raises(ValueError, match=r"got peft\.tuners\.ia3\.layer\.Linear; .* out of adapters other than LoRA"):
        read_head(find_head(student))
    student = tiny_model(tie=False)
    student.lm_head.weight = nn.Parameter(torch.zeros(259, 32, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"lm_head\.weight: expected float32"):
        read_head(find_head(student))
    for settings, message in (
        ({"lora_dropout": 0.1}, r"student\.lora\.dropout: expected 0"),
        ({"use_dora": True}, "DoRA"),
        ({"lora_bias": True}, "biases"),
    ):
        student = get_peft_model(tiny_model(tie=False), LoraConfig(r=2, target_modules=["lm_head"], **settings))
        with pytest.raises(ValueError, match=message):
            read_head(find_head(student))


@pytest.mark.parametrize("config", [PromptTuningConfig, PrefixTuningConfig])
def test_adapters_that_add_positions_are_refused_before_the_student_runs(config):
    student = get_peft_model(tiny_model(), config(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match="student: adapter 'default' is prompt learning"):
        DistillationObjective(tiny_model(seed=1), student)


def test_a_batch_without_labels_is_refused():
    objective = DistillationObjective(tiny_model(seed=1), tiny_model())
    with pytest.raises(ValueError, match="labels"):
        objective.student_inputs({"input_ids": torch.ones(1, 3, dtype=torch.int64)})


def test_autocast_gives_the_same_loss_to_rounding():
    student, teacher = tiny_model(), tiny_model(seed=1)
    objective = DistillationObjective(teacher, student, MIXED)
    exact = gradients(student, student(**objective.student_inputs(batch()))["loss"])
    with torch.autocast("cpu", torch.bfloat16):
        loss = student(**objective.student_inputs(batch()))["loss"]
    assert loss.dtype == torch.float32
    for name, gradient in gradients(student, loss).items():
        assert relative_error(gradient, exact[name]) < 0.05, name
