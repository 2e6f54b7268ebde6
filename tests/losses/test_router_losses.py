"""Losses and figures of a student's routers, beside what the forwards of transformers' classes add to their loss."""

import copy

import pytest
import torch
from tiny import tiny_model
from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func

from distill.data.collator import Collator, content_mask
from distill.models.patch.patching import patch
from distill.models.routers import find_routers
from distill.objectives.router_losses import z_loss
from distill.recipe import Loss
from distill.teachers.objective import DistillationObjective
from scripts.families import checks

# families whose forward adds a load-balancing loss, and their coefficient's name
FAMILIES = {
    "deepseek_v4": "router_aux_loss_coef",
    "ernie4_5_moe": "router_aux_loss_coef",
    "flex_olmo": "router_aux_loss_coef",
    "gpt_oss": "router_aux_loss_coef",
    "granitemoe": "router_aux_loss_coef",
    "granitemoehybrid": "router_aux_loss_coef",
    "granitemoeshared": "router_aux_loss_coef",
    "jamba": "router_aux_loss_coef",
    "jetmoe": "aux_loss_coef",
    "minimax": "router_aux_loss_coef",
    "minimax_m2": "router_aux_loss_coef",
    "mixtral": "router_aux_loss_coef",
    "olmoe": "router_aux_loss_coef",
    "phimoe": "router_aux_loss_coef",
    "qwen2_moe": "router_aux_loss_coef",
    "qwen3_moe": "router_aux_loss_coef",
    "qwen3_next": "router_aux_loss_coef",
}
LABELS = Loss.model_validate({"terms": [{"type": "cross_entropy"}]})
MIXTURE = {
    "kind": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}


def batch_of(vocabulary):
    """Two rows, the second one with padding on the right."""
    ids = torch.randint(3, vocabulary, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def configured(name, coefficient):
    model = checks.random_model(name).double()
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "eager"  # grouped GEMMs know no float64
    model.config.output_router_logits = True
    setattr(model.config, FAMILIES[name], coefficient)
    setattr(model, FAMILIES[name], coefficient)  # the forward reads the coefficient of its construction
    return model


def with_gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def our_loss(model, batch, loss=LABELS, **more):
    objective = DistillationObjective(copy.deepcopy(model), model, loss)
    try:
        return model(**objective.student_inputs(batch, **more))["loss"]
    finally:
        objective.detach()


@pytest.mark.plain("gpt_oss", "minimax_m2")
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_of_the_familys_own_forward(name):
    """With patched experts and routers too."""
    model = configured(name, 0.3)
    batch = batch_of(model.config.vocab_size)
    own = model(**batch, use_cache=False)
    assert own.aux_loss > 1  # a coefficient that is not read would be seen
    expected = with_gradients(model, own.loss)
    patched = copy.deepcopy(model)
    patch(patched, attention=None, log_it=False)
    for student in (model, patched):
        loss = our_loss(student, batch)
        assert abs(loss - own.loss) <= 1e-6 * own.loss  # transformers sums in float32
        gradients = with_gradients(student, loss)
        largest = max(gradient.norm() for gradient in expected.values())
        for key, gradient in expected.items():
            error = (gradients[key] - gradient).norm() / gradient.norm().clamp_min(1e-3 * largest)
            assert error <= 2e-5, f"{key}: {error:.1e}"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mixtral", {"router_aux_loss_coef": 0.3}),  # as published: no output_router_logits
        ("mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.0}),
        ("llama4_text", {"output_router_logits": True, "router_aux_loss_coef": 0.3}),  # which its forward does not read
        ("deepseek_v3", {"output_router_logits": True}),
    ],
)
def test_a_configuration_that_asks_for_none_adds_nothing(name, settings):
    model = checks.random_model(name)
    for key, value in settings.items():
        setattr(model.config, key, value)
    batch = batch_of(model.config.vocab_size)
    none = Loss.model_validate({"terms": LABELS.terms, "router": "none"})
    assert our_loss(model, batch) == our_loss(model, batch, none)


def test_coefficients_of_the_recipe_take_the_place_of_the_configurations():
    model = configured("qwen3_moe", 0.3)
    batch = batch_of(model.config.vocab_size)
    plain = our_loss(model, batch, Loss.model_validate({"terms": LABELS.terms, "router": "none"}))
    own = model(**batch, use_cache=False)
    weighted = Loss.model_validate({"terms": LABELS.terms, "router": {"balance": 0.5, "z": 0.25}})
    keep = batch["attention_mask"].flatten() != 0
    logits = torch.stack([each[keep] for each in own.router_logits])
    z = torch.logsumexp(logits, -1).square().mean()
    assert our_loss(model, batch, weighted).item() == pytest.approx((plain + 0.5 * own.aux_loss + 0.25 * z).item())
    assert z_loss(list(own.router_logits), keep).item() == pytest.approx(router_z_loss_func(logits).item())


def test_micro_batches_count_by_their_trained_tokens():
    model = configured("qwen3_moe", 0.3)
    batch = batch_of(model.config.vocab_size)
    rows = [{key: value[number : number + 1] for key, value in batch.items()} for number in range(2)]
    trained = [int((row["labels"][:, 1:] != -100).sum()) for row in rows]
    assert trained == [11, 8]
    expected = sum(n * model(**row, use_cache=False).loss for n, row in zip(trained, rows, strict=True)) / 19
    total = sum(our_loss(model, row, num_items=torch.tensor(19)) for row in rows)
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)


def test_padding_of_the_collator_is_left_out():
    model = configured("qwen3_moe", 0.3)
    ids = batch_of(model.config.vocab_size)["input_ids"].tolist()
    rows = [{"input_ids": ids[0]}, {"input_ids": ids[1][:9]}]
    expected = our_loss(model, batch_of(model.config.vocab_size)).item()
    for side in ("right", "left"):
        batch = Collator(2, padding_side=side, columns=(content_mask,))(rows)
        assert our_loss(model, batch).item() == pytest.approx(expected, rel=1e-9), side
    packed = [{"input_ids": ids[0] + ids[1][:9], "position_ids": [*range(12), *range(9)]}]
    assert our_loss(model, Collator(2, columns=(content_mask,))(packed)).item() == pytest.approx(expected, rel=1e-9)


def test_figures_are_those_of_the_routers_outputs():
    student = tiny_model(**MIXTURE, seed=1)
    teacher = tiny_model(**MIXTURE, seed=2)
    batch = batch_of(259)
    keep = batch["attention_mask"].flatten() != 0
    objective = DistillationObjective(copy.deepcopy(teacher), student, "forward_kl")
    inputs = objective.student_inputs(batch)
    student(**inputs)
    objective.detach()
    found = inputs["step_inputs"].value.layers.router_sums.figures()
    ids = {key: batch[key] for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        outputs = [model(**ids, output_router_logits=True).router_logits for model in (student, teacher)]
    logits = [[z[keep] for z in each] for each in outputs]
    loads, entropies, shares = [], [], []
    for z, other in zip(*logits, strict=True):
        chosen, theirs = (set(enumerate(map(frozenset, each.topk(2).indices.tolist()))) for each in (z, other))
        counts = torch.tensor([sum(e in experts for _, experts in chosen) for e in range(4)], dtype=torch.float64)
        loads.append(counts.max() / counts.mean())
        mean = z.softmax(-1).mean(0)
        entropies.append(-(mean * mean.log()).sum())
        pairs = zip(sorted(chosen, key=lambda each: each[0]), sorted(theirs, key=lambda each: each[0]), strict=True)
        shares += [len(own[1] & others[1]) / 2 for own, others in pairs]
    assert found["router_load"] == pytest.approx(float(sum(loads) / 2), rel=1e-5)
    assert found["router_entropy"] == pytest.approx(float(sum(entropies) / 2), rel=1e-5)
    assert found["router_agreement"] == pytest.approx(sum(shares) / len(shares), rel=1e-5)
    assert 0 < found["router_agreement"] < 1 and "router_balance" not in found


def test_a_dense_student_has_no_routers_to_train():
    model = tiny_model()
    assert find_routers(model) == {}
    wanted = Loss.model_validate({"terms": LABELS.terms, "router": {"balance": 0.1}})
    with pytest.raises(ValueError, match=r"loss\.router: expected a student that is a mixture of experts, .* LlamaFor"):
        DistillationObjective(copy.deepcopy(model), model, wanted)


@pytest.mark.parametrize("pairs", ["auto", [[1, 0]]], ids=str)
def test_the_term_is_the_kl_of_the_routers_distributions(pairs):
    """Against transformers' own router logits, and every gradient."""
    student = tiny_model(**MIXTURE, seed=1).double()
    teacher = tiny_model(**MIXTURE, seed=2).double()
    for model in (student, teacher):
        model.config._experts_implementation = "eager"
    batch = batch_of(259)
    keep = torch.nn.functional.pad(batch["labels"][:, 1:] != -100, (0, 1)).flatten()
    ids = {key: batch[key] for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        theirs = teacher(**ids, use_cache=False, output_router_logits=True).router_logits
    own = student(**ids, use_cache=False, output_router_logits=True).router_logits
    pairs_of_layers = [(0, 0), (1, 1)] if pairs == "auto" else pairs
    divergences = [
        torch.nn.functional.kl_div(
            own[a][keep].log_softmax(-1), theirs[b][keep].log_softmax(-1), reduction="batchmean", log_target=True
        )
        for a, b in pairs_of_layers
    ]
    kl = sum(divergences) / len(divergences)
    expected = with_gradients(student, kl)
    terms = [{"type": "cross_entropy"}, {"type": "router", "weight": 0.7, "layers": pairs}]
    losses, gradients = [], []
    for wanted in (terms, terms[:1]):
        objective = DistillationObjective(copy.deepcopy(teacher), student, {"terms": wanted})
        losses.append(student(**objective.student_inputs(batch))["loss"])
        gradients.append(with_gradients(student, losses[-1]))
        objective.detach()
    assert (losses[0] - losses[1]).item() == pytest.approx(0.7 * kl.item(), rel=1e-6) and kl > 1e-3
    for key, gradient in expected.items():
        torch.testing.assert_close(gradients[0][key] - gradients[1][key], 0.7 * gradient, rtol=1e-5, atol=1e-7)


def test_the_term_expects_as_many_experts():
    terms = {"terms": [*LABELS.terms, {"type": "router"}]}
    for student, got in ((tiny_model(), "no"), (tiny_model(**{**MIXTURE, "num_experts": 8}), "8")):
        with pytest.raises(ValueError, match=f"two mixtures of as many experts, got a student of {got} experts"):
            DistillationObjective(tiny_model(**MIXTURE), student, terms)
