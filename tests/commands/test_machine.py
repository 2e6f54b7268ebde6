"""GPUs by name and family: what is planned for a GPU, which path it takes, what it is refused."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from distill_kernels import launch
from distill_kernels.launch import FAMILIES, INTERPRETER, OLDER, UNKNOWN, device_facts, family_of
from tiny import tiny_model

from distill.cli import run_command
from distill.core.units import GIB
from distill.doctor import machine
from distill.doctor.machine_checks import CHECKS
from distill.models import dtypes as precision
from distill.models import gpu_specs
from distill.models.gpu_specs import GPU_SPECS, find_gpu_spec, match_gpu_spec, path_of
from distill.models.shape import USABLE
from distill.planning.device_plan import planned_precision
from distill.planning.devices import find_device
from distill.planning.preflight import check_run
from distill.recipe import load, parse
from distill.teachers import kernels, opening
from distill.teachers.load_context import load_context
from distill.teachers.registry import source_of

ROOT = Path(__file__).resolve().parents[2]
NAMED = ["4090", "3090", "a100-40", "a100-80", "l40s", "h100", "h200", "b200", "5090", "mi300x"]
WITHOUT_FP8 = {"3090", "a100-40", "a100-80", "mi300x"}
ADVICE = "use int8, or teacher.offload: cpu"


# ---------------------------------------------------------------- cards


@pytest.mark.parametrize(
    "name, gpu_spec",
    [
        ("4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("GeForce RTX 4090", "RTX 4090"),
        ("a100-40", "A100 40GB"),
        ("A100 40GB", "A100 40GB"),
        ("a100", "A100 80GB"),
        ("a100-80gb", "A100 80GB"),
        ("h100 pcie", "H100 PCIe"),
        ("mi300x", "MI300X"),
        ("24GB", None),
        ("40", None),
        ("4000", None),
        ("", None),
    ],
)
def test_a_card_is_found_by_what_people_call_it(name, gpu_spec):
    assert find_gpu_spec(name) == gpu_spec


@pytest.mark.parametrize(
    "name, gib, gpu_spec",
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", 79.1, "A100 80GB"),
        ("NVIDIA A100-PCIE-40GB", 39.6, "A100 40GB"),
        ("NVIDIA GeForce RTX 4090", 23.6, "RTX 4090"),
        ("NVIDIA H100 80GB HBM3", 79.2, "H100"),
        ("NVIDIA H100 NVL", 93.0, "H100 NVL"),
        ("NVIDIA L40S", 44.4, "L40S"),
        ("NVIDIA L4", 22.0, "L4"),
        ("Tesla T4", 14.6, "T4"),
        ("AMD Instinct MI300X", 191.98, "MI300X"),
        ("Tesla V100-SXM2-32GB", 31.7, "V100 32GB"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.7, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.5, None),
        ("NVIDIA TITAN V", 11.8, None),
    ],
)
def test_a_card_is_known_by_what_its_driver_calls_it(name, gib, gpu_spec):
    assert match_gpu_spec(name, gib * GIB) == (None if gpu_spec is None else GPU_SPECS[gpu_spec])


def test_every_card_belongs_to_a_family_that_launches_know():
    for name, gpu_spec in GPU_SPECS.items():
        assert gpu_spec.family in FAMILIES or gpu_spec.family == OLDER, name
        assert gpu_spec.family != INTERPRETER
        # the data sheet and the kernels agree on fp8; MI300 has another form of e4m3, which the kernels do not know
        has = gpu_spec.family in FAMILIES and FAMILIES[gpu_spec.family].fp8
        assert (gpu_spec.fp8 is not None) == has or name == "MI300X", name
        assert (
            gpu_spec.bf16 is None or gpu_spec.fp8 is None or gpu_spec.fp8 == pytest.approx(2 * gpu_spec.bf16, rel=0.02)
        ), name


@pytest.mark.parametrize("family", [*FAMILIES, OLDER, UNKNOWN])
def test_a_path_names_the_kernels_and_how_they_were_tested(family):
    text = path_of(family)
    assert text.startswith("Triton kernels" if family in FAMILIES else "PyTorch computes") and "\n" not in text
    if family in FAMILIES:
        assert ("TMA loads" in text) == FAMILIES[family].tma
        assert ("H100" in text) == (family == "sm_90")


# ---------------------------------------------------------------- the plan


def plan(gpu, *overrides):
    recipe = load(ROOT / "recipes" / "llama3-8b-to-1b-lora.yaml", overrides)
    return check_run(recipe, find_device(gpu), read_data=False)


@pytest.fixture(scope="module")
def of_two():
    """Seconds of products and of bytes, times these rates: by an H100 and an H200, which differ in bandwidth alone."""
    slow, fast = (plan(gpu).seconds_per_step for gpu in ("H100", "H200"))
    moved = (slow - fast) / (1 / 3350 - 1 / 4800)
    return (slow - moved / 3350) * 989.4, moved


@pytest.mark.plain("4090", "a100-40", "l40s", "h200", "5090")
@pytest.mark.parametrize("gpu", NAMED)
def test_a_plan_for_each_card_has_its_memory_time_and_path(gpu, of_two):
    report, gpu_spec = plan(gpu), GPU_SPECS[find_gpu_spec(gpu)]
    assert report.device.gpu_spec == gpu_spec and report.device.family == gpu_spec.family
    products, moved = of_two
    assert report.seconds_per_step == pytest.approx(products / gpu_spec.bf16 + moved / gpu_spec.bandwidth)
    # a part is done again for the gradients, and adapters move as much as the layers beside them
    assert 0.35e12 * gpu_spec.bf16 < report.flops_per_step / report.seconds_per_step < 0.6e12 * gpu_spec.bf16
    assert report.fits == (report.memory.peak <= USABLE * gpu_spec.memory_gib * GIB)
    assert path_of(gpu_spec.family) == report.device.path
    in_fp8 = plan(gpu, "teacher.dtype=fp8")
    refusals = [problem for problem in in_fp8.problems if problem.startswith("teacher.dtype: fp8 needs")]
    assert bool(refusals) == (gpu in WITHOUT_FP8)
    if not refusals:
        assert 0.7 < in_fp8.seconds_per_step / report.seconds_per_step < 0.9
    else:
        assert gpu_spec.family in refusals[0] and "offload" in refusals[0]


@pytest.mark.parametrize("gpu, bits", [("3090", "int8"), ("4090", "fp8")])
def test_advice_for_a_large_teacher_is_what_the_card_can(gpu, bits):
    named = ["teacher={model: somewhere, config: llama-3.1-8b}", "data.max_length=512"]
    labels = [label for label, _, _ in plan(gpu, *named).advice]
    assert any(label.startswith(f"teacher.dtype={bits} ") for label in labels), labels
    assert not any(label.startswith("teacher.dtype=fp8") for label in labels) or bits == "fp8"


def test_a_t4_is_planned_in_float32_on_pytorch(capsys):
    recipe = load(ROOT / "recipes" / "llama3-8b-to-1b.yaml", ["train.precision=auto", "teacher.dtype=auto"])
    assert planned_precision(recipe, find_device("T4")).compute == torch.float32
    overrides = ["teacher.init=random", "student.init=random", "data.source=synthetic"]
    assert run_command(["check", "llama3-8b-to-1b", "--gpu", "t4", *overrides]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "our kernels do not run" in line] == [f"kernels     {path_of(OLDER)}"]
    assert any(line.startswith("memory (for our kernels; PyTorch takes more)") for line in lines)


def test_a_plan_as_json_names_the_path(capsys):
    overrides = ["teacher.init=random", "student.init=random", "data.source=synthetic"]
    assert run_command(["check", "llama3-8b-to-1b-lora", "--gpu", "4090", "--json", *overrides]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert found["kernels"] == path_of("sm_89") and found["device"]["gpu_spec"]["bandwidth"] == 1008


# ---------------------------------------------------------------- the GPU that is there


@pytest.fixture
def gpu(monkeypatch):
    """Has torch see a GPU that is not there."""

    def of(capability, name="NVIDIA X", gib=15):
        facts = SimpleNamespace(
            name=name,
            major=capability[0],
            minor=capability[1],
            multi_processor_count=40,
            total_memory=gib * GIB,
            shared_memory_per_block=48 << 10,
            shared_memory_per_block_optin=64 << 10,
            L2_cache_size=4 << 20,
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
        launch._cuda_facts.cache_clear()
        return torch.device("cuda", 0)

    yield of
    launch._cuda_facts.cache_clear()


def test_this_machines_gpu_is_planned_by_its_card_and_family(gpu):
    gpu((8, 9), "NVIDIA L40S", 44.4)
    device = find_device(None)
    assert device.gpu_spec == GPU_SPECS["L40S"] and device.family == "sm_89" and device.path == path_of("sm_89")
    gpu((13, 0), "NVIDIA Z1")
    device = find_device(None)
    assert device.gpu_spec is None and device.family == UNKNOWN
    assert device.path.startswith("PyTorch computes")


RECIPE = """
teacher: {model: teacher, dtype: fp8}
student: {init: random, config: teacher}
data: {source: text.txt, max_length: 32, cache: false}
train: {steps: 1, batch_size: 2}
"""


pytestmark = pytest.mark.place(text="\n".join(f"line {i} of some text to learn" for i in range(100)), teacher={})


@pytest.mark.parametrize("capability, family", [((8, 0), "sm_80"), ((8, 6), "sm_86"), ((7, 5), OLDER)])
def test_an_fp8_teacher_is_refused_before_it_is_read(gpu, workplace, monkeypatch, unread, capability, family):
    device, recipe = gpu(capability), parse(RECIPE)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    unread(workplace / "teacher")
    source, context = source_of(recipe), load_context(recipe)
    assert context.device == device
    with pytest.raises(ValueError, match=rf"^teacher\.dtype: fp8 needs a GPU .*; this one is {family}: {ADVICE}$"):
        opening.open_pair(source, source.vocabulary(), context)


def test_fp8_is_taken_where_it_is_known_or_emulated(gpu, workplace):
    source = source_of(parse(RECIPE))
    for capability in ((8, 9), (9, 0), (10, 0), (12, 0)):
        family = gpu_specs.family_in(gpu(capability))
        assert source.problems(cuda=True, sharded=False, family=family) == []
    assert source.problems(cuda=False, sharded=False) == [] == source.problems(cuda=True, sharded=False)


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (13, 0)])
def test_a_gpu_without_kernels_is_named_in_a_line_and_models_stay(gpu, hardware, capsys, capability):
    device, model = gpu(capability, "Tesla T4"), tiny_model()
    hardware.setattr("distill.teachers.kernels.next", lambda _: SimpleNamespace(device=device), raising=False)
    before = {name: module.forward for name, module in model.named_modules()}
    kernels.patch_models(SimpleNamespace(student=model, models=lambda: [("student", model)]), None)
    assert capsys.readouterr().out.splitlines() == [f"kernels     Tesla T4: {path_of(gpu_specs.family_in(device))}"]
    assert before == {name: module.forward for name, module in model.named_modules()}


def test_bf16_is_not_taken_where_it_is_only_emulated(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert precision.resolve_precision(parse(RECIPE), torch.device("cuda")).compute == torch.float32


# ---------------------------------------------------------------- doctor --machine


# what of all checks the doctor runs here, besides those that no CPU computes; tests/ops/test_ops.py runs every one
OF_PYTORCH = {"cu_seqlens_from_position_ids", "lora_linear", "shared_linear"}
OF_TRITON = {"fused_kl_loss", "rms_norm", "flash_attention: causal", "FusedAdamW: three steps"}


@pytest.mark.full
def test_the_doctor_of_a_cpu_checks_kernels_and_ends_well(workplace, monkeypatch, capsys, limit):
    assert [name for name, _ in machine.JOBS] == [*CHECKS, *(name for name, _ in machine.RATES)]
    cannot = {name for name in CHECKS if not CHECKS[name].needs(device_facts(torch.device("cpu")))}
    jobs = [job for job in machine.JOBS if job[0] in cannot | OF_PYTORCH | OF_TRITON | {"copy", "GEMM"}]
    limit.setattr(machine, "JOBS", jobs)
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:word@mirror.example/x")
    monkeypatch.setenv("SHELLS_OWN", "1")
    assert run_command(["doctor", "--machine", "--json"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    lines = {line["name"]: line["detail"] for line in found["environment"]}
    assert (
        lines["path"].startswith("PyTorch references of the kernels run on the CPU")
        and {"torch", "libraries", "models", "runs"} <= lines.keys()
    )
    assert lines["HF_TOKEN"] == "(set)" and lines["HF_ENDPOINT"] == "https://...@mirror.example/x"
    assert "hf_abc" not in text and "word@" not in text and "SHELLS_OWN" not in lines
    results = {finding["name"]: finding for finding in found["kernels"]}
    assert (
        list(results)[:-2] == [name for name, _ in jobs[:-2]]
        and "copy" in results
        and results.keys() > OF_PYTORCH | OF_TRITON
    )
    skipped = {name for name, finding in results.items() if not finding["passed"]}
    assert skipped == cannot
    of_pytorch = {name for name in [*results][:-2] if "Triton in its inter" not in results[name]["detail"]}
    assert of_pytorch - skipped == OF_PYTORCH
    assert "_row_kernel" in results["fused_kl_loss"]["detail"]


@pytest.mark.parametrize("capability, says", [((8, 9), "sm_89 (8.9), 40 multi"), ((7, 5), "older (7.5), 40 multi")])
def test_the_family_of_each_gpu_is_a_line(gpu, monkeypatch, capability, says):
    gpu(capability)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (line,) = [line for line in machine.machine_lines() if line.name == "GPU 0 path"]
    assert line.fine and line.detail.startswith(says) and line.detail.endswith(path_of(family_of(capability)))
