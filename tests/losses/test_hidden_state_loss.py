"""Terms that compare layers of both models: values and gradients, packing, padding, projections, layer maps."""

import copy
import math

import pytest
import torch
from helpers import relative_error
from peft import LoraConfig, get_peft_model
from tiny import tiny_model
from torch import nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from distill.cli import run_command
from distill.data.collator import Collator
from distill.doctor.check_setup import CheckSetup
from distill.doctor.invariants import CHECKS
from distill.planning.devices import find_device
from distill.planning.memory import step_memory
from distill.planning.preflight import device_plan
from distill.recipe import parse
from distill.recipe.layer_terms import pairs_of
from distill.recipe.loss import Loss
from distill.teachers.objective import DistillationObjective

EXACT = 1e-9  # both sides in fp64
ROWS = [
    {
        "input_ids": [5, 6, 7, 8, 9, 30, 31],
        "labels": [-100, 6, 7, -100, -100, 30, 31],
        "position_ids": [0, 1, 2, 3, 0, 1, 2],
    },
    {"input_ids": [11, 12, 13, 14], "labels": [-100, -100, 13, 14], "position_ids": [0, 1, 2, 3]},
    {"input_ids": [21, 22, 23, 24, 25], "labels": [-100, 22, 23, 24, 25], "position_ids": [0, 1, 2, 3, 4]},
]
WEIGHT = 0.3
HIDDEN = {"type": "hidden_state", "layers": [[0, 0], [1, 2]], "weight": WEIGHT}
RELATION = {"type": "attention_relation", "layers": [[0, 1], [1, 3]], "weight": WEIGHT}
EVERY_TERM = [
    {"type": "forward_kl"},
    {"type": "hidden_state", "projection": "learned", "weight": 0.2},
    {"type": "hidden_state", "projection": "learned", "metric": "cosine", "layers": [[1, 2]]},
    {"type": "attention_relation", "weight": 0.4},
]


def loss_of(*terms, **more):
    return Loss.model_validate({"terms": [{"type": "forward_kl"}, *terms], **more})


def models(width=32, dtype=torch.float64, **student):
    """A student of three layers and a teacher of five."""
    return tiny_model(dtype=dtype, layers=3, **student), tiny_model(dtype=dtype, layers=5, hidden=width, seed=1)


def batch(rows=ROWS, **collator):
    return Collator(2, **collator)(rows)


def computed(student, teacher, loss, inputs=None, num_items=None):
    """Loss and gradients through the objective; the projections' gradients by the name of the parameter."""
    objective = DistillationObjective(teacher, student, loss)
    student.zero_grad()
    value = student(**objective.student_inputs(batch() if inputs is None else inputs, num_items))["loss"]
    value.backward()
    found = {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}
    objective.detach()
    return value.detach(), found


def by_hand(student, teacher, added):
    """The forward KL plus WEIGHT x the mean over trained tokens of `added(outputs of both, keep)`."""
    inputs = batch()
    body = {name: inputs[name] for name in ("input_ids", "position_ids")}
    own = student(**body, use_cache=False, output_hidden_states=True)
    with torch.no_grad():
        other = teacher(**body, use_cache=False, output_hidden_states=True)
    keep = F.pad(inputs["labels"][:, 1:], (0, 1), value=-100) != -100
    log_s, log_t = (x.logits[keep].log_softmax(-1) for x in (own, other))
    divergence = (log_t.exp() * (log_t - log_s)).sum(-1)
    student.zero_grad()
    value = (divergence.sum() + WEIGHT * added(own, other, keep).sum()) / keep.sum()
    value.backward()
    return value.detach(), {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}


def assert_same(ours, theirs, within=EXACT):
    torch.testing.assert_close(ours[0], theirs[0], rtol=within, atol=within)
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        assert relative_error(ours[1][name], gradient) <= within, name


@pytest.mark.parametrize("metric", ["mse", "cosine"])
@pytest.mark.parametrize("projection", ["none", "learned"])
def test_hidden_states_equal_plain_pytorch(metric, projection):
    student, teacher = models(64 if projection == "learned" else 32)
    drawn = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) / math.sqrt(32)
    weight = nn.Parameter(drawn.double())

    def added(own, other, keep):
        total = 0.0
        for ours, theirs in HIDDEN["layers"]:  # hidden_states[0] is the embedding
            s, t = own.hidden_states[ours + 1][keep], other.hidden_states[theirs + 1][keep]
            s = s @ weight.T if projection == "learned" else s
            total = total + (((s - t) ** 2).mean(-1) if metric == "mse" else 1 - F.cosine_similarity(s, t, dim=-1))
        return total / 2

    expected = by_hand(student, teacher, added)
    got = computed(student, teacher, loss_of({**HIDDEN, "metric": metric, "projection": projection}))
    of_projection = got[1].pop("layer_projections.0.weight", None)
    assert_same(got, expected)
    if projection == "learned":
        assert relative_error(of_projection, weight.grad) <= EXACT
    else:
        assert of_projection is None


def queries_keys_values(model, inputs):
    """Return queries, keys and values of each layer of a Llama by its own modules: [B, heads, S, width]."""
    found, decoder = [], model.model

    def remember(module, args, kwargs):
        x = args[0] if args else kwargs["hidden_states"]
        split = [p(x).unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for p in (module.q_proj, module.k_proj)]
        cos, sin = decoder.rotary_emb(x, inputs["position_ids"])
        value = module.v_proj(x).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        found.append((*apply_rotary_pos_emb(*split, cos, sin), value))

    hooks = [x.self_attn.register_forward_pre_hook(remember, with_kwargs=True) for x in decoder.layers]
    return found, hooks


@pytest.mark.parametrize("heads", [None, 4])
def test_attention_relations_equal_plain_pytorch(heads):
    student, teacher = models(64)
    inputs = batch()
    own, hooks = queries_keys_values(student, inputs)
    other, more = queries_keys_values(teacher, inputs)
    documents = (inputs["position_ids"] == 0).cumsum(-1)
    sees = (documents[:, None] == documents[..., None]).tril()[:, None]

    def relations(states):
        b, _, s, _ = states.shape
        split = states.transpose(1, 2).reshape(b, s, heads or 2, -1).transpose(1, 2)
        z = split @ split.mT / split.shape[-1] ** 0.5
        return z.masked_fill(~sees, -1e30).log_softmax(-1)

    def added(_, __, keep):
        total = 0.0
        for ours, theirs in RELATION["layers"]:
            for s, t in zip(own[ours], other[theirs], strict=True):
                log_s, log_t = relations(s), relations(t)
                total = total + (log_t.exp() * (log_t - log_s)).sum(-1).mean(1)[keep]
        return total / 2

    expected = by_hand(student, teacher, added)
    for hook in (*hooks, *more):
        hook.remove()
    assert_same(computed(student, teacher, loss_of({**RELATION, "heads": heads})), expected)


@pytest.mark.parametrize("term", [{**HIDDEN, "projection": "learned"}, RELATION], ids=lambda term: term["type"])
def test_micro_batches_add_up_to_one_batch(term):
    student, teacher = models(64)
    loss, items = loss_of(term), torch.tensor(10)  # trained tokens of all rows
    whole = computed(student, teacher, loss)
    parts = [computed(student, teacher, loss, batch([row]), items) for row in ROWS]
    total = sum(value for value, _ in parts), {name: sum(g[name] for _, g in parts) for name in whole[1]}
    assert_same(total, whole)


@pytest.mark.parametrize("term", [HIDDEN, {**HIDDEN, "metric": "cosine"}, RELATION], ids=str)
def test_packing_and_padding_leak_nothing(term):
    student, teacher = models()
    first, second = ({name: column[part] for name, column in ROWS[0].items()} for part in (slice(4), slice(4, 7)))
    loss, items = loss_of(term), torch.tensor(10)
    whole = computed(student, teacher, loss, num_items=items)
    alone = computed(student, teacher, loss, batch([first, second, *ROWS[1:]]), items)
    assert_same(alone, whole)
    left = computed(student, teacher, loss, batch(padding_side="left", pad_to_multiple_of=11), items)
    assert_same(left, whole)


def test_equal_models_are_at_distance_0_and_masked_tokens_do_not_count():
    student, _ = models()
    teacher = copy.deepcopy(student)
    terms = [{"type": "hidden_state"}, {"type": "hidden_state", "metric": "cosine"}, {"type": "attention_relation"}]
    objective = DistillationObjective(teacher, student, loss_of(*terms))
    inputs = objective.student_inputs(batch())
    student(**inputs)
    sums = inputs["step_inputs"].value.layers.sums
    assert list(sums) == ["hidden_state", "hidden_state-2", "attention_relation"]
    for total, tokens in sums.values():
        assert abs(total) < 1e-9 and tokens == 10
    with torch.no_grad():
        for p in teacher.model.layers[0].parameters():
            p.add_(0.1)
    masked = batch([{**row, "labels": [-100] * len(row["labels"])} for row in ROWS])
    output = student(**objective.student_inputs(masked))
    assert output["loss"] == 0
    output["loss"].backward()
    assert all(p.grad is None or not p.grad.any() for p in student.parameters())


@pytest.mark.parametrize("kind", ["lora", "checkpointed", "both"])
def test_adapters_and_recomputed_layers_change_nothing(kind):
    """LoRA as merged weights would, layers that are computed twice as those that are computed once."""
    student, teacher = models(64)
    loss = Loss.model_validate({"terms": EVERY_TERM})
    if kind != "checkpointed":
        torch.manual_seed(3)
        student = get_peft_model(student, LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"])).double()
        for name, p in student.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.1)
    plain = copy.deepcopy(student).eval()
    expected = computed(plain, teacher, loss)
    if kind != "lora":
        student.gradient_checkpointing_enable({"use_reentrant": False})
        student.enable_input_require_grads()
    student.train()
    got = computed(student, teacher, loss)
    assert any("layer_projections.1" in name for name in expected[1])
    assert_same(got, expected)
    if kind != "checkpointed":
        merged = copy.deepcopy(plain).merge_and_unload()
        torch.testing.assert_close(computed(merged, teacher, loss)[0], expected[0], rtol=EXACT, atol=EXACT)


def test_only_chosen_layers_are_kept():
    student, teacher = models()
    objective = DistillationObjective(teacher, student, loss_of(HIDDEN, RELATION))
    states = objective.student_inputs(batch())["step_inputs"].value.layers
    assert states.teacher.outputs.keys() == {0, 2} and states.teacher.attention.keys() == {1, 3}
    hooks = [module for model in (student, teacher) for module in model.modules() if module._forward_hooks]
    assert not hooks
    held_out = DistillationObjective(teacher, student, loss_of(HIDDEN))
    held_out.loss = held_out.held_out_loss()
    assert held_out.student_inputs(batch())["step_inputs"].value.layers is None


def test_layers_map_evenly_or_as_given():
    assert pairs_of("auto", 3, 12) == [(0, 3), (1, 7), (2, 11)]
    assert pairs_of("auto", 4, 6) == [(0, 0), (1, 2), (2, 3), (3, 5)]
    assert pairs_of("auto", 2, 2) == [(0, 0), (1, 1)]
    assert pairs_of([[1, 4]], 2, 5) == [(1, 4)]
    kept = loss_of({"type": "hidden_state"}, {"type": "attention_relation"}).with_kept_layers([0, 1, 4])
    assert kept.terms[1].layers == [[0, 0], [1, 1], [2, 4]] and kept.terms[2].layers == [[2, 4]]
    assert kept.with_kept_layers([0, 1, 3]) == kept and loss_of().with_kept_layers([0]) == loss_of()
    assert [term.layers for term in kept.with_automatic_layers().terms[1:]] == ["auto", "auto"]
    with pytest.raises(ValueError, match="at most the teacher's 2 layers, got 3; give pairs"):
        pairs_of("auto", 3, 2)
    with pytest.raises(ValueError, match="layers of the teacher from 0 to 4, got 5"):
        pairs_of([[0, 5]], 2, 5)


def test_a_pruned_student_is_compared_with_the_layers_that_it_was():
    from distill.models.prune.pruning import cut_layers

    _, teacher = models()
    student = cut_layers(teacher, [0, 3])
    term = {"type": "hidden_state", "layers": "auto", "weight": WEIGHT}
    kept, uniform = loss_of(term).with_kept_layers([0, 3]), loss_of(term)
    for loss, zero in ((kept, True), (uniform, False)):
        objective = DistillationObjective(teacher, student, loss)
        states = objective.student_inputs(batch())["step_inputs"].value
        with torch.no_grad():
            student(**objective.student_inputs(batch()))
        assert (states.layers.teacher.outputs.keys() == {0, 3}) is zero
        objective.detach()
    # layer 0 is the same in both, so its distance is 0
    first = loss_of({**term, "layers": [[0, 0]]})
    inputs = DistillationObjective(teacher, student, first).student_inputs(batch())
    student(**inputs)
    assert inputs["step_inputs"].value.layers.sums["hidden_state"][0] == 0


def test_models_that_do_not_fit_are_refused():
    student, teacher = models(64)
    with pytest.raises(ValueError, match="projection: none expects a student of the teacher's width 64, got 32"):
        DistillationObjective(teacher, student, loss_of({"type": "hidden_state"}))
    with pytest.raises(ValueError, match="heads: expected a divisor of the student's width of query, 32, got 5"):
        DistillationObjective(teacher, student, loss_of({"type": "attention_relation", "heads": 5}))
    _, shallow = models()
    with pytest.raises(ValueError, match="auto expects a student of at most the teacher's 3 layers, got 5"):
        DistillationObjective(student, shallow, loss_of({"type": "hidden_state"}))
    student.config._attn_implementation = "eager"
    objective = DistillationObjective(teacher, student, loss_of({"type": "attention_relation"}))
    with pytest.raises(ValueError, match="layer 2 of LlamaForCausalLM does not call attention through"):
        student(**objective.student_inputs(batch()))


def test_doctor_compares_with_a_reference_of_its_own():
    student, teacher = models(64, dtype=torch.float32)
    subject = CheckSetup(student, teacher, ROWS, Loss.model_validate({"terms": EVERY_TERM}))
    findings = [check(subject) for check in CHECKS]
    assert all(finding.passed is not False for finding in findings), [str(f) for f in findings if f.passed is False]
    assert "layer_projections" not in student._modules


CHECKED = """
teacher: {config: recipes/architectures/llama-3.1-8b, init: random}
student: {config: recipes/architectures/llama-3.2-1b, init: random}
data: {source: synthetic, max_length: 1024}
train: {steps: 3, batch_size: 2}
"""


def test_the_memory_estimate_holds_the_kept_states():
    def planned(*terms, **train):
        recipe = parse(CHECKED).model_copy(update={"loss": loss_of(*terms)})
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update=train)})
        return step_memory(device_plan(recipe, find_device("H100"), 1))

    tokens, teacher, student, pairs = 2 * 1024, 4096, 2048, 16
    plain = planned()
    assert "states of layers" not in plain.parts
    hidden = planned({"type": "hidden_state", "projection": "learned"})
    assert hidden.parts["states of layers"] == tokens * 2 * pairs * (teacher + teacher + student)
    assert hidden.parts["layer projections"] == 4 * 4 * teacher * student  # weight, gradient, two states in float32
    added = sum(hidden.parts[name] for name in ("states of layers", "layer projections"))
    assert hidden.moments["loss"] - plain.moments["loss"] == added
    relation = planned({"type": "attention_relation"}, gradient_checkpointing=True)
    assert relation.parts["states of layers"] == tokens * 2 * (4096 + 2 * 1024 + 2048 + 2 * 512)


def test_check_refuses_widths_that_differ(capsys, tmp_path):
    (tmp_path / "r.yaml").write_text(CHECKED + "loss: {terms: [{type: forward_kl}, {type: hidden_state}]}\n")
    assert run_command(["check", str(tmp_path / "r.yaml"), "--gpu", "H100"]) == 1
    assert "projection: none expects a student of the teacher's width 4096, got 2048" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize("padding_id", [0, 1, None])
def test_padding_on_the_left_is_no_key_of_attention_relations(padding_id):
    """A row with padding and its mask has the loss of the row without, whatever position ids its padding has."""
    student, teacher = models()
    row = {name: torch.tensor([ROWS[2][name]]) for name in ("input_ids", "labels", "position_ids")}
    expected, gradients = computed(student, teacher, loss_of(RELATION), row)
    padded = {
        "input_ids": F.pad(row["input_ids"], (3, 0), value=2),
        "labels": F.pad(row["labels"], (3, 0), value=-100),
        "attention_mask": F.pad(torch.ones_like(row["labels"]), (3, 0)),
    }
    if padding_id is not None:
        padded["position_ids"] = F.pad(row["position_ids"], (3, 0), value=padding_id)
    got, found = computed(student, teacher, loss_of(RELATION), padded)
    # without position ids the row's are shifted by three: rotary embeddings are computed in fp32
    assert_same((got, found), (expected, gradients), within=1e-5 if padding_id is None else 1e-7)
