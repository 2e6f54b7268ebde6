"""`distill check` of an offloaded teacher: what stays on the GPU, what waits, what crosses the bus in what time."""

import pytest
from test_offload import CPU, frozen

from distill.core.units import GIB
from distill.models.gpu_specs import PCIE_5
from distill.models.precision.offload import offload_layers
from distill.models.shape import model_sizes
from distill.planning.devices import LINK_EFFICIENCY, find_device
from distill.planning.preflight import check_run
from distill.planning.step_time import GEMM_EFFICIENCY
from distill.recipe import load
from distill.recipe.shipped import find_recipe
from distill.teachers.registry import source_of


def looked_at(*overrides, gpu="H100", gpus=1, name="llama3-8b-to-1b"):
    return check_run(load(find_recipe(name), overrides), find_device(gpu), gpus=gpus, read_data=False)


def test_check_counts_what_stays_and_what_waits():
    plain, report = looked_at(), looked_at("teacher.offload=cpu")
    shape = report.teacher
    layer = 4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 14336 + 2 * 4096
    assert (shape.layered, shape.largest_layer) == (32 * layer, layer)
    assert plain.memory.parts["teacher"] == 2 * shape.parameters
    assert report.memory.parts["teacher"] == 2 * (shape.parameters - 30 * layer)
    assert report.host == 2 * 32 * layer and plain.host == plain.moved == 0
    assert report.moved == report.host * report.accumulation
    assert report.memory.peak == pytest.approx(plain.memory.peak - 2 * 30 * layer)
    assert looked_at("teacher.offload=cpu", gpus=4).host == 4 * report.host
    only_labels = "loss={terms: [{type: cross_entropy}]}"
    assert looked_at("teacher.offload=cpu", only_labels).moved == 0


def test_check_counts_a_real_model_as_it_is_offloaded():
    model = frozen(tie=False)
    shape = model_sizes(model)
    conveyor = offload_layers(model, CPU).__dict__["_distill_streamer"]
    padding = 256 * sum(map(len, conveyor.parameters))
    assert 4 * shape.layered <= sum(map(len, conveyor.host)) <= 4 * shape.layered + padding
    assert 4 * shape.largest_layer <= max(map(len, conveyor.host)) <= 4 * shape.largest_layer + padding


def test_the_time_is_the_slower_of_arithmetic_and_bus():
    """The teacher's arithmetic hides its transfers with many tokens a micro-batch, not with few."""
    many = [looked_at(*more) for more in ((), ("teacher.offload=cpu",))]
    assert many[1].seconds_per_step >= many[0].seconds_per_step
    few = [
        looked_at("train.batch_size=1", "data.max_length=256", "train.tokens_per_step=65536", *more)
        for more in ((), ("teacher.offload=cpu",))
    ]
    assert few[1].accumulation == 256
    bus = 256 * few[1].host / (LINK_EFFICIENCY * PCIE_5 * 1e9)
    assert few[1].seconds_per_step > bus > few[0].seconds_per_step
    student = few[1].seconds_per_step - bus  # arithmetic of the student alone
    assert 0 < student < few[0].seconds_per_step
    assert student * find_device("H100").gpu_spec.flops * GEMM_EFFICIENCY < few[1].flops_per_step
    assert looked_at("teacher.offload=cpu", gpu="24GB").seconds_per_step is None  # a rate that nobody knows


def test_check_offers_it_with_what_it_saves_and_crosses():
    report = looked_at(gpu="24GB")
    (row,) = [row for row in report.advice if row[0].startswith("teacher.offload=cpu")]
    saved = looked_at("teacher.offload=cpu", gpu="24GB").memory.peak
    assert row[1] == pytest.approx((report.memory.peak - saved) / GIB)
    assert f"{2 * report.teacher.layered / GIB:.1f} GiB cross the bus" in row[0]
    for given in ("teacher.offload=cpu", "teacher.dtype=fp8"):
        assert not any(label.startswith("teacher.offload") for label, _, _ in looked_at(given, gpu="24GB").advice)


@pytest.mark.full
def test_an_offloaded_teacher_is_never_sharded():
    few = {"name": "llama3-70b-to-8b-lora", "gpus": 2}
    assert "teacher sharded" in looked_at(**few).strategy
    report = looked_at("teacher.offload=cpu", **few)
    assert "teacher sharded" not in report.strategy and report.ok
    assert "teacher sharded" not in looked_at("teacher.dtype=int8", **few).strategy


def test_70b_of_a_teacher_fits_one_gpu_when_it_is_offloaded():
    (shape,) = source_of(load(find_recipe("llama3-70b-to-8b-lora"))).shapes()
    report = looked_at("teacher.offload=cpu", name="llama3-70b-to-8b-lora")
    assert report.fits and report.host > 0.95 * 2 * shape.layered
    assert not looked_at(name="llama3-70b-to-8b-lora").fits
