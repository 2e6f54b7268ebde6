"""Planning of a launched teacher server: when it pays, memory of each side, settings that a recipe may give."""

from pathlib import Path

import pytest

from distill.planning import teacher_server as planning
from distill.planning.devices import find_device
from distill.planning.preflight import check_run, device_plan
from distill.recipe import load

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
DRY = ["teacher.init=random", "student.init=random", "data.source=synthetic"]


def lora_70b(*overrides):
    return load(ROOT / "recipes/llama3-70b-to-8b-lora.yaml", [*DRY, *overrides])


def chosen(recipe, gpu="H100", gpus=4):
    return planning.choose_teacher_server(device_plan(recipe, find_device(gpu), gpus)).parallel


@pytest.mark.plain("80GB")
@pytest.mark.parametrize("gpu", ["H100", "80GB"])  # memory decides, known rates or not
def test_an_fp8_teacher_without_room_for_a_student_gets_a_server(gpu):
    """70B in fp8 on 2, the LoRA student on 2: it cannot be cut, and copies leave no room; 3 would leave 1 to train."""
    recipe = lora_70b("teacher.dtype=fp8")
    parallel = chosen(recipe, gpu)
    assert (parallel.teacher, parallel.teacher_gpus) == ("served", 2)
    plans = list(planning._with_servers(device_plan(recipe, find_device(gpu), 4)))
    assert [each.recipe.parallel.teacher_gpus for each in plans] == [2, 3]


def test_models_that_fit_together_get_no_server():
    recipe = lora_70b()
    assert planning.choose_teacher_server(device_plan(recipe, find_device("H100"), 4)) is recipe


@pytest.mark.parametrize(
    "overrides, gpu",
    [
        (["teacher.dtype=fp8", "parallel.teacher=copied"], "H100"),
        (["teacher.dtype=fp8"], "cpu"),
        (["teacher.dtype=fp8", "loss.terms=[{type: cross_entropy}]"], "H100"),  # nobody asks the teacher
    ],
)
def test_a_server_is_not_chosen_without_auto_or_a_gpu(overrides, gpu):
    assert chosen(lora_70b(*overrides), gpu).teacher_gpus is None


def test_a_launch_chooses_on_gpus_and_a_resumed_run_keeps_what_it_began_with(tmp_path, hardware):
    recipe, device = lora_70b("teacher.dtype=fp8"), find_device("H100")
    hardware.setattr(planning.DevicePlan, "here", staticmethod(lambda *_: device_plan(recipe, device, 4)))
    hardware.setattr(planning.torch.cuda, "is_available", lambda: True)
    training, chosen = planning.assign_gpus(recipe, 4, None)
    assert (training, chosen.parallel.teacher, chosen.parallel.teacher_gpus) == (2, "served", 2)
    begun = tmp_path / "recipe.yaml"
    begun.write_text((ROOT / "recipes/llama3-70b-to-8b-lora.yaml").read_text())
    assert planning.assign_gpus(recipe, 4, begun) == (4, recipe)
    for parallel in ("{teacher: served, teacher_gpus: 3}", "{teacher: ranks, teacher_ranks: 3}"):  # the latter of old
        began = begun.read_text().partition("parallel:")[0]
        begun.write_text(began + f"parallel: {parallel}\n")
        assert planning.assign_gpus(recipe, 4, begun)[0] == 1
    with pytest.raises(ValueError, match="teacher_gpus: expected fewer than the 2 GPUs there are"):
        planning.assign_gpus(chosen, 2, None)


def test_check_prints_the_memory_of_both_sides():
    report = check_run(lora_70b("teacher.dtype=fp8"), find_device("H100"), gpus=4, read_data=False)
    assert report.ok and report.fits and report.training == 2 and report.strategy.endswith("on 2, teacher on 2")
    assert any("2 of 4 serve the teacher (a copy each, 70." in note for note in report.notes)
    head = 128256 * 8192 * 2 / GIB
    assert report.memory.parts["teacher"] / GIB == pytest.approx(head)
    shards = check_run(
        lora_70b("parallel={teacher: served, teacher_gpus: 2}"), find_device("H100"), gpus=4, read_data=False
    )
    assert any("(shards, 71." in note for note in shards.notes) and shards.ok
    one = lora_70b("parallel={teacher: served, teacher_gpus: 1}", "train.tokens_per_step=98304")
    whole = check_run(one, find_device("H100"), gpus=4, read_data=False)
    assert not whole.ok and any("got 13" in problem for problem in whole.problems)
    with pytest.raises(ValueError, match="expected fewer than the 1 GPUs there are"):
        check_run(one, find_device("H100"), gpus=1, read_data=False)
