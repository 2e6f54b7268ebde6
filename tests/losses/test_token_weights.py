"""Token weights (`loss.token_weights`): each teacher's loss is the weighted mean of its tokens' losses.

The reference is doctor's: full logits in float64 from there on, plain PyTorch, without weights. It is taken once for
each value that a weight has, over rows whose other labels are masked, and the results are added up here.
"""

import json
import math
from dataclasses import replace

import pytest
import torch
from subjects import KINDS
from tiny import save_models, tiny_model

from distill import cli
from distill.core.labels import IGNORE_INDEX
from distill.data.collator import Collator
from distill.doctor import reference_loss
from distill.doctor.rows import split_row
from distill.objectives.token_weights import TokenWeighting, batch_arrays
from distill.recipe.loss import Loss, TokenWeights
from distill.teachers.objective import DistillationObjective

EVERY = [subject for subjects in KINDS.values() for subject in subjects]


# ------------------------------------------------------------------ positions, token after token


def trained_runs(row):
    """Yield the answers of a row: lists of the places of their tokens, in plain Python."""
    covered = {place for a, b, _, _ in zip(*[iter(row.get("spans", []))] * 4, strict=True) for place in range(a, b)}
    run = []
    for place, (label, position) in enumerate(zip(row["labels"], row["position_ids"], strict=True)):
        if position and (label != IGNORE_INDEX or place in covered):
            run.append(place)
            continue
        if run:
            yield run
        run = []
    if run:
        yield run


def positions(row):
    """Return position and length of the answer by place."""
    return {place: (n, len(run)) for run in trained_runs(row) for n, place in enumerate(run)}


def only(row, kept):
    """Return a row whose labels outside of these places are masked, and whose spans begin there."""
    labels = [label if place in kept else IGNORE_INDEX for place, label in enumerate(row["labels"])]
    masked = {**row, "labels": labels}
    if "spans" in row:
        spans = list(zip(*[iter(row["spans"])] * 4, strict=True))
        masked["spans"] = [number for span in spans if span[0] in kept for number in span]
    return masked


def weight_of(form, position, length):
    begin, end = form.get("window", [None, None])
    inside = position in range(length)[slice(begin, end)]
    return inside * form.get("gamma", 1.0) ** position


def gradients_of(student):
    found = {name: p.grad.double().clone() for name, p in student.named_parameters() if p.grad is not None}
    student.zero_grad(set_to_none=True)
    return found


def weighted_reference(subject, form):
    """Return loss and gradients of the weighted mean, and the number of trained tokens and their weights' sum."""
    places = [positions(row) for row in subject.rows]
    tokens = [(n, at) for n, row in enumerate(subject.rows) for at, label in enumerate(row["labels"]) if at in places[n]]
    tokens = [(n, at) for n, at in tokens if subject.rows[n]["labels"][at] != IGNORE_INDEX]
    by_weight = {}
    for n, at in tokens:
        by_weight.setdefault(weight_of(form, *places[n][at]), []).append((n, at))
    loss = 0.0
    gradients = {}
    total = 0.0
    for weight, group in by_weight.items():
        total += weight * len(group)
        if weight == 0:
            continue
        rows = [only(row, {at for m, at in group if m == n}) for n, row in enumerate(subject.rows)]
        own, own_gradients = replace(subject, rows=rows).reference_loss()
        factor = weight * len(group) / len(tokens)
        loss += factor * own.item()
        for name, gradient in own_gradients.items():
            gradients[name] = gradients.get(name, 0.0) + factor * gradient.double()
    return loss, gradients, len(tokens), total


def stored_reference(subject, form, without):
    """Return what `weighted_reference` does, of a store, which knows documents by their labels: row after row."""
    weights = []
    for row in subject.rows:
        places = positions(row)
        weights += [weight_of(form, *places[at]) for at, label in enumerate(row["labels"]) if label != IGNORE_INDEX]
    mean = reference_loss._mean

    def weighted_mean(soft, z_s, labels, loss):
        each = [mean(soft[n : n + 1], z_s[n : n + 1], labels[n : n + 1], loss) for n in range(len(weights))]
        return sum(weight * own for weight, own in zip(weights, each, strict=True)) / len(labels)

    with without.context() as patch:
        patch.setattr(reference_loss, "_mean", weighted_mean)
        loss, gradients = subject.reference_loss()
    return loss.item(), {name: own.double() for name, own in gradients.items()}, len(weights), sum(weights)


def our_loss(subject, form, **more):
    section = subject.loss.model_copy(update={"token_weights": TokenWeights(**form)})
    objective = replace(subject, loss=section).objective()
    with subject.in_eval_mode():
        output = subject.student(**objective.student_inputs(subject.batch(), **more))
        output["loss"].backward()
    objective.detach()
    return output, gradients_of(subject.student)


@pytest.mark.plain(
    *[f"gamma-{name}" for name in ("one", "several", "across", "informed", "routed across", "routed top k", "hidden")],
    *[f"window-{name}" for name in ("drawing", "student top k", "routed", "several informed", "bucket", "served")],
)
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    "form",
    [{"gamma": 0.7}, {"gamma": 0.9, "window": [1, -1], "normalise": "mean"}],
    ids=["gamma", "window"],
)
def test_every_teachers_loss_is_the_weighted_mean(name, form, subject_of, without):
    subject = subject_of(name)
    output, gradients = our_loss(subject, form)
    if name in (*KINDS["cache"], *KINDS["keep"]):
        loss, expected, tokens, total = stored_reference(subject, form, without)
    else:
        loss, expected, tokens, total = weighted_reference(subject, form)
    scale = tokens / total if form.get("normalise") == "mean" else 1.0
    bound = max(subject.tolerance, 1e-5)
    assert output["loss"].item() == pytest.approx(scale * loss, rel=bound)
    assert gradients.keys() == expected.keys()
    largest = max(value.norm() for value in expected.values()) * scale
    for parameter, value in expected.items():
        assert (gradients[parameter] - scale * value).norm() <= bound * largest, parameter
    assert output["token_weights"][:2].tolist() == pytest.approx([tokens, total], rel=1e-5)
    unweighted = subject.reference_loss()[0].item()
    assert abs(unweighted - scale * loss) > 1e-3 * abs(unweighted)  # weights that do nothing would not be seen
    subject.student.zero_grad(set_to_none=True)
