"""Memory that plans count for a quantised student, against what training holds on a CPU."""

import gc

import pytest
import torch
from distill_kernels.quantisation.formats import FORMATS
from tiny import tiny_model

from distill.models.adapters import add_lora
from distill.models.dtypes import quantised_weights
from distill.planning.devices import find_device
from distill.planning.memory import step_memory
from distill.planning.preflight import check_run, device_plan
from distill.recipe import parse
from distill.training.quantise import quantise_at_once


def held_bytes():
    """Return the bytes of all tensors that Python holds, views once."""
    gc.collect()
    storages = {}
    for held in gc.get_objects():
        if type(held) in (torch.Tensor, torch.nn.Parameter) and not held.is_meta:
            storages[held.untyped_storage().data_ptr()] = held.untyped_storage().nbytes()
    return sum(storages.values())


PLANNED = """
teacher: {config: student, init: random}
student: {config: student, init: random, quantise: {format: q4_0}}
data: {source: synthetic, max_length: 32}
train: {steps: 3, batch_size: 1}
"""


SEARCHED = ("q4_k", "q6_k")  # formats whose scales are searched
CELLS = [(name, scales) for name in FORMATS for scales in ("learned", "absmax")[: 1 if name in SEARCHED else 2]]


@pytest.mark.plain("q4_k-learned-True")
@pytest.mark.parametrize("name, scales, lora", [(*cell, n % 2 == 0) for n, cell in enumerate(CELLS)])
def test_the_plan_counts_the_bytes_that_training_holds(tmp_path, monkeypatch, name, scales, lora):
    monkeypatch.chdir(tmp_path)
    config = tiny_model(seed=2, hidden=256).config
    config.save_pretrained("student")
    more = [f"student.quantise={{format: {name}, scales: {scales}}}"]
    recipe = parse(PLANNED, [*more, *["student.lora={r: 4, targets: [up_proj]}"] * lora])

    def planned(recipe):
        return step_memory(device_plan(recipe, find_device("H100"), 1)).parts["optimizer states"]

    plain = recipe.model_copy(update={"student": recipe.student.model_copy(update={"quantise": None})})
    expected = planned(recipe) - planned(plain)
    model = tiny_model(seed=2, hidden=256)
    model = add_lora(model, recipe.student.lora) if lora else model
    before = held_bytes()
    quantise_at_once(model, recipe.student.quantise)
    scales = quantised_weights(model).scales
    following = None if scales is None else scales.following
    marks = 0 if following is None else following.nbytes  # which blocks began at zero: known once there are weights
    assert held_bytes() - before - marks == pytest.approx(expected, rel=1e-3)
    assert expected > 4 * model.get_parameter(next(n for n, _ in model.named_parameters() if "up_proj" in n)).numel()


def test_the_check_names_what_a_format_cannot_hold(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_model(hidden=64, intermediate_size=72).config.save_pretrained("student")
    found = check_run(parse(PLANNED), find_device("H100"))
    (note,) = [note for note in found.notes if note.startswith("student.quantise: ")]
    assert "2 matrices (" in note and "stay as they are, such as model.layers.0.mlp.down_proj.weight: rows" in note
    tiny_model(hidden=64).config.save_pretrained("student")
    assert not [note for note in check_run(parse(PLANNED), find_device("H100")).notes if "student.quantise" in note]


def test_autocast_copies_the_weights_of_a_quantised_student_with_adapters(tmp_path, monkeypatch):
    """Unlike those of base weights in 16 bits; the plan counts them, and the temporaries of the backward."""
    monkeypatch.chdir(tmp_path)
    model, saved = tiny_model(seed=1, hidden=64), {}
    model.config.save_pretrained("student")
    recipe = parse(PLANNED, ["student.lora={r: 4, targets: all-linear}", "train.precision=bfloat16"])
    found = step_memory(device_plan(recipe, find_device("H100"), 1))
    model = add_lora(model, recipe.student.lora)
    quantise_at_once(model, recipe.student.quantise)
    linears = {tuple(p.shape) for key, p in model.named_parameters() if "_proj" in key and "lora_" not in key}

    def keep(tensor):
        if tensor.dtype == torch.bfloat16 and {tuple(tensor.shape), tuple(tensor.shape[::-1])} & linears:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept), torch.autocast("cpu", torch.bfloat16):
        rows = torch.arange(3, 27)[None]  # fewer than any weight has
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
    assert loss.isfinite()
    first = model.base_model.model.model.layers[0].self_attn
    read_once = (first.q_proj, first.k_proj, first.v_proj)  # their input needs no gradient: the embedding is frozen
    assert found.parts["weight copies"] == sum(saved.values()) + sum(2 * part.weight.numel() for part in read_once)
