"""The teacher's part of the MFU: what its models read, token by token, whatever the student reads."""

import pytest
import torch
from subjects import across, informed, kept, one, routed, several

from distill.models.flops import FlopCounts, count_flops
from distill.training.metrics import Meter, count_sums

MAKERS = {"one": one, "mixture": several, "context": informed, "cross": across, "routed": routed}


def read_by(models):
    """Forward hooks that note what decoders get: the ids and positions of each call, by the model's name."""
    calls = {}
    for name, model in models.items():
        model.get_decoder().register_forward_pre_hook(
            lambda module, args, kwargs, name=name: calls.setdefault(name, []).append(kwargs), with_kwargs=True
        )
    return calls


def pairs_of(call):
    positions = call.get("position_ids")
    if positions is None:
        positions = torch.arange(call["input_ids"].shape[1]).expand_as(call["input_ids"])
    return (positions + 1).sum().item()


@pytest.mark.parametrize("kind", MAKERS)
def test_tokens_and_pairs_are_those_that_its_models_got(kind):
    subject = MAKERS[kind]()
    batch, teacher = subject.batch(), subject.teacher
    calls = read_by(teacher.models)
    output = subject.student(**(objective := subject.objective()).student_inputs(batch))
    works = {name: count_flops(model, trains=False) for name, model in teacher.models.items()}
    expected = sum(
        works[name].token * call["input_ids"].numel() + works[name].pair * pairs_of(call)
        for name, each in calls.items()
        for call in each
    )
    assert len(calls) == len(teacher.models) and expected > 0
    without_heads = {p: w and w._replace(trained=0.0) for p, w in teacher.flops_per_token().items()}
    meter = Meter(torch.device("cpu"), without_heads, FlopCounts(1.0, 0.0, 0.0), objective.divergence, objective.routes)
    meter.peak = 1e6
    meter.add(batch, output["statistics"].detach())
    figures = meter.read(lambda values: values)
    assert figures["mfu_teacher"] * 1e6 * figures["seconds"] == pytest.approx(expected)
    assert figures["mfu_student"] * 1e6 * figures["seconds"] == pytest.approx(batch["input_ids"].numel())


def test_heads_are_counted_for_the_tokens_of_their_routes():
    subject = routed()
    batch = subject.batch()
    heads = {prefix: FlopCounts(0.0, 10.0**n, 0.0) for n, prefix in enumerate(subject.teacher.flops_per_token())}
    objective = subject.objective()
    meter = Meter(torch.device("cpu"), heads, FlopCounts(1.0, 0.0, 0.0), objective.divergence, objective.routes)
    meter.peak = 1e6
    meter.add(batch, torch.zeros(count_sums(objective.routes)))
    figures = meter.read(lambda values: values)
    expected = len(batch["route0_rows"]) + 10 * len(batch["route1_rows"])
    assert figures["mfu_teacher"] * 1e6 * figures["seconds"] == pytest.approx(expected)
    assert len(batch["route0_rows"]) + len(batch["route1_rows"]) == len(batch["valid_rows"])


def test_a_teacher_that_is_queried_in_some_steps_has_no_mfu():
    assert kept().teacher.flops_per_token() == {"": None}
