"""`distill check`: parameters counted exactly, memory that follows the settings, advice that holds, problems found."""

import json
from pathlib import Path

import pytest
import torch
from distill_kernels import FusedKLLoss, FusedTopKKLLoss
from distill_kernels.launch import device_facts
from distill_kernels.losses import fused
from helpers import realistic_heads
from tiny import tiny_config, tiny_model
from transformers import AutoModelForCausalLM, GPT2Config

from distill.cli import run_command
from distill.core.units import GIB
from distill.models.adapters import add_lora
from distill.models.dtypes import Precision
from distill.models.flops import parameters_of
from distill.models.shape import model_sizes
from distill.planning import memory
from distill.planning.device_plan import planned_precision
from distill.planning.devices import LINK_EFFICIENCY, find_device
from distill.planning.memory import LOADING, layer_activations, step_memory
from distill.planning.preflight import check_run, device_plan
from distill.planning.step_time import COPY_EFFICIENCY
from distill.recipe import Lora, WeightedLocalTeacherConfig, load, parse
from distill.recipe.shipped import shipped_architectures, shipped_recipes
from distill.teachers.backends.local import SHARDED_FP8
from distill.teachers.registry import source_of

# as published on the models' cards or counted from their released weights
PUBLISHED = {
    "granite-3.3-8b": 8_170_864_640,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-30b-a3b": 30_532_122_624,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
}
HARDWARE = {
    "qwen3-30b-a3b-to-1.7b": ("H200", 1),
    "llama3-8b-to-1b-lora": ("RTX 4090", 1),
    "llama3-8b-nf4-lora": ("RTX 4090", 1),
    "llama3-70b-to-8b-lora": ("H100", 4),
}
ROOT = Path(__file__).resolve().parents[2]


def recipe(*overrides):
    return load(ROOT / "recipes" / "llama3-8b-to-1b.yaml", overrides)


def meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize("name", shipped_architectures())
def test_shipped_architectures_have_the_published_number_of_parameters(name):
    (shape,) = source_of(recipe(f"teacher={{init: random, config: {name}}}")).shapes()
    assert shape.parameters == PUBLISHED[name]


def test_gpt2_is_124_44_million():
    shape = model_sizes(meta(GPT2Config()))
    assert shape.parameters == 124_439_808 and shape.tied and not shape.gated
    assert (shape.intermediate, shape.query, shape.key_value, shape.layers) == (3072, 768, 768, 12)
    assert shape.linear == 12 * (768 * 2304 + 2304 + 768 * 768 + 768 + 2 * 768 * 3072 + 3072 + 768)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2", "granite"])
def test_counts_agree_with_a_real_model(kind):
    model = tiny_model(kind=kind, layers=3, tie=kind != "qwen2")
    shape = model_sizes(model)
    assert (shape.parameters, shape.trained) == parameters_of(model)
    assert shape.tied is (kind != "qwen2") and shape.gated and shape.rank == 0
    lora = add_lora(model, Lora(r=4, targets=["q_proj", "down_proj"]))
    adapted = model_sizes(lora)
    assert (adapted.parameters, adapted.trained) == parameters_of(lora)
    assert adapted.linear == shape.linear and adapted.rank == 4
    assert adapted.adapted == 3 * (32 + 64)


def test_activations_are_what_autograd_keeps():
    """One layer's formula against the tensors that PyTorch saves, in fp32, where our kernels save what eager does."""
    from torch.autograd.graph import saved_tensors_hooks

    def kept(layers):
        model = tiny_model(layers=layers, hidden=64).train()
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        found = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                found[storage.data_ptr()] = storage  # the reference keeps the address from being used again
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model(input_ids=torch.zeros(1, 128, dtype=torch.int64), use_cache=False).logits
        total = sum(storage.nbytes() for storage in found.values())
        del output
        return total / 128

    measured = kept(3) - kept(2)
    predicted = layer_activations(model_sizes(tiny_model(hidden=64)), compute=4, residual=4, autocast=False)
    # eager norms and SiLU keep intermediate results that ours do not; nothing of the formula's may be missing
    assert predicted <= measured <= 2 * predicted


# ---------------------------------------------------------------- memory


def of(*overrides, gpu="H200", gpus=1):
    return check_run(recipe(*overrides), find_device(gpu), gpus=gpus, read_data=False)


def test_weights_gradients_and_states_are_exact():
    memory = of().memory
    trained = PUBLISHED["llama-3.2-1b"]
    assert memory.parts["teacher"] == 2 * PUBLISHED["llama-3.1-8b"]
    assert memory.parts["student"] == memory.parts["gradients"] == 4 * trained
    assert memory.parts["optimizer states"] == 8 * trained
    assert memory.logits_avoided == 2 * 4 * 8192 * 128_256
    assert memory.peak == max(memory.moments.values())


@pytest.mark.plain(
    "train.batch_size=1-activations-0.5",
    "student.dtype=bfloat16-gradients-0.5",
    "teacher.dtype=float32-teacher-2",
    "student.dtype=bfloat16-optimizer states-0.5",
    "loss.terms=[{type: cross_entropy}]-head gradient-1",
)
@pytest.mark.parametrize(
    "override, part, factor",
    [
        ("train.batch_size=1", "activations", 0.5),
        ("data.max_length=2048", "activations", 0.5),
        ("student.dtype=bfloat16", "gradients", 0.5),
        ("student.dtype=bfloat16", "weight copies", 0),
        ("teacher.dtype=float32", "teacher", 2),
        ("train.optimizer=adamw_torch", "optimizer states", 1),
        ("train.optimizer_states=bfloat16", "optimizer states", 0.5),
        ("student.dtype=bfloat16", "optimizer states", 0.5),
        ("train.optimizer=sgd", "optimizer states", 0),
        ("loss.terms=[{type: cross_entropy}]", "head gradient", 1),
    ],
)
def test_a_setting_changes_its_part(override, part, factor):
    assert of(override).memory.parts[part] == pytest.approx(of().memory.parts[part] * factor, rel=0.01)


def test_optimizers_keep_what_they_keep():
    trained = PUBLISHED["llama-3.2-1b"]
    masters = of("student.dtype=bfloat16", "train.master_weights=true", "train.optimizer_states=float32")
    assert masters.memory.parts["optimizer states"] == (8 + 4) * trained
    assert of("train.optimizer=adamw_torch").memory.parts["optimizer temporary"] == 4 * trained
    assert of().memory.parts["optimizer temporary"] == 0


def test_checkpointing_keeps_one_layer():
    whole, few = of().memory.parts["activations"], of("train.gradient_checkpointing=true").memory.parts["activations"]
    assert few < whole / 5


def test_devices_share_what_the_strategy_lets_them():
    quantised = "student.quantise.format=q4_k"
    ddp, fsdp = (of(f"parallel.strategy={name}", quantised, gpus=8).memory for name in ("ddp", "fsdp"))
    assert ddp.parts["gradients"] == of().memory.parts["gradients"] == ddp.parts["gradient buckets"]
    assert all(fsdp.parts[name] == ddp.parts[name] / 8 for name in ("gradients", "optimizer states"))
    assert fsdp.parts["teacher"] == ddp.parts["teacher"] and fsdp.peak < ddp.peak


# ---------------------------------------------------------------- advice and verdicts


def test_what_a_run_would_refuse_of_its_arguments_is_refused():
    unknown = "arguments.nope: expected a field of transformers' TrainingArguments"
    for argument, message in (("nope=1", unknown), ("logging_first_step=3", "expected true or false")):
        with pytest.raises(ValueError, match=message):
            of(f"train.arguments.{argument}")


def test_a_run_that_does_not_fit_is_reported_with_advice():
    report = of(gpu="24GB")
    assert not report.fits and not report.ok and "memory: the peak of" in report.problems[0]
    saved = [gib for _, gib, _ in report.advice]
    assert saved == sorted(saved, reverse=True) and saved[0] > 5
    assert of(gpu="H100").ok


@pytest.mark.full
@pytest.mark.parametrize("gpu", ["H100", "24GB"])
def test_advice_saves_the_memory_it_names(gpu):
    before = of(gpu=gpu, gpus=2)
    offered = {label.split("=")[0] for label, _, _ in before.advice}
    assert offered >= {"train.gradient_checkpointing", "train.batch_size"}
    # where nothing fits whole, the run shards by itself, and there is nothing left to gain by asking
    assert ("parallel.strategy" in offered) is (gpu == "H100")
    for label, saved, fits in before.advice:
        settings = label.split(" (")[0].split()
        after = of(*settings, gpu=gpu, gpus=2)
        assert (before.memory.peak - after.memory.peak) / GIB == pytest.approx(saved), label
        assert after.fits is fits, label


def test_time_and_disk_follow_the_sizes(monkeypatch):
    one, eight = of(gpu="H100"), of(gpu="H100", gpus=8)
    assert one.tokens_per_step == eight.tokens_per_step == 65_536
    assert (one.accumulation, eight.accumulation) == (8, 1)
    assert one.flops_per_step == pytest.approx(eight.flops_per_step)
    gradients, states = (eight.memory.parts[name] for name in ("gradients", "optimizer states"))
    optimizer = (3 * gradients + 2 * states) / (COPY_EFFICIENCY * 3350e9)  # on every one of them
    exchanged = 2 * 7 / 8 * gradients / (LINK_EFFICIENCY * 450e9)
    assert one.seconds_per_step - optimizer == pytest.approx(8 * (eight.seconds_per_step - optimizer - exchanged))
    # 2 P tokens of the teacher and 6 P of the student are most of it
    assert one.flops_per_step == pytest.approx(65_536 * (2 * 8.03e9 + 6 * 1.236e9), rel=0.1)
    assert one.seconds == pytest.approx(2000 * one.seconds_per_step)
    weights = 4 * PUBLISHED["llama-3.2-1b"]
    assert one.disk == weights + 3 * 3 * weights
    assert of("train.save_every=null").disk == weights
    monkeypatch.setattr("distill.core.files.free_bytes", lambda path: 2 * weights)
    (problem,) = of().problems
    assert problem == f"disk: expected {one.disk / GIB:.1f} GiB free in runs, got {2 * weights / GIB:.1f} GiB"
    assert of("train.save_every=null").ok
    assert of(gpu="24GB").seconds_per_step is None


@pytest.mark.plain("chat-8b-to-1b")
@pytest.mark.parametrize("shipped", shipped_recipes(), ids=lambda shipped: shipped.name)
def test_every_shipped_recipe_fits_its_hardware(shipped):
    gpu, gpus = HARDWARE.get(shipped.name, ("H100", 1))
    report = check_run(load(shipped.path), find_device(gpu), gpus=gpus, read_data=False)
    assert report.fits, report.problems


def of_70b(*overrides, gpu="H100", gpus=4):
    path = ROOT / "recipes" / "llama3-70b-to-8b-lora.yaml"
    return check_run(load(path, overrides), find_device(gpu), gpus=gpus, read_data=False)


@pytest.mark.full
def test_a_teacher_of_70b_is_shared_by_four_gpus():
    """A quarter of it on each, two layers or the head gathered; the student in shards too, as the run decides."""
    report = of_70b()
    assert report.strategy == "fsdp, teacher sharded" and report.fits
    whole = 2 * PUBLISHED["llama-3.1-70b"]
    gathered = max(2 * report.teacher.linear / 80, 128_256 * 8192) * 2
    assert report.memory.parts["teacher"] == pytest.approx(whole / 4 + gathered)
    assert report.memory.parts["student"] < 2 * PUBLISHED["llama-3.1-8b"] / 3.5
    in_fp8 = of_70b("teacher.dtype=fp8", "loss.terms=[{type: cross_entropy}]")  # nobody asks it, so no server
    assert f"teacher.dtype: {SHARDED_FP8}; use bfloat16" in in_fp8.problems
    assert of_70b("teacher.dtype=fp8").strategy.endswith("teacher on 2")
    assert not of_70b("parallel.teacher=copied").fits
    assert of_70b(gpus=8).memory.parts["teacher"] == pytest.approx(whole / 8 + gathered)


def test_several_teachers_are_all_held_and_all_run():
    one = of()
    sections = [
        WeightedLocalTeacherConfig(model=name, config="llama-3.1-8b", dtype="bfloat16") for name in ("a/b", "a/c")
    ]
    both = recipe().model_copy(update={"teachers": sections})
    two = check_run(both, find_device("H200"), read_data=False)
    assert two.memory.parts["teacher"] == 2 * one.memory.parts["teacher"]
    more = two.flops_per_step - one.flops_per_step
    assert more == pytest.approx(65_536 * 2 * 8.03e9, rel=0.1)


def test_an_fp8_teacher_is_loaded_before_it_is_small():
    """Whole, to measure what fp8 costs; a layer at a time where it does not fit whole: 70B on one GPU."""
    report = of_70b("teacher.dtype=fp8", gpu="H200", gpus=1)
    assert report.memory.parts["teacher"] < 0.52 * 2 * PUBLISHED["llama-3.1-70b"]
    assert report.fits and not report.problems and LOADING not in report.memory.moments
    small = of("teacher.dtype=fp8")
    assert small.fits and small.memory.moments[LOADING] == 2 * PUBLISHED["llama-3.1-8b"] + 4 * PUBLISHED["llama-3.2-1b"]


@pytest.mark.full
def test_an_fp8_mixture_is_counted_with_its_experts():
    """One byte for each weight of experts, q, k, v and o projections; two for embedding, head, routers and norms."""

    def of_mixture(*settings):
        mixture = load(ROOT / "recipes/qwen3-30b-a3b-to-1.7b.yaml", ["teacher.dtype=fp8", *settings])
        return check_run(mixture, find_device("H100"), read_data=False).memory

    memory = of_mixture()
    wide = 2 * 151_936 * 2048 + 48 * (128 * 2048 + 2 * 2048 + 2 * 128) + 2048
    assert memory.parts["teacher"] == PUBLISHED["qwen3-30b-a3b"] + wide
    assert memory.peak < 0.95 * 79.1 * 2**30
    skipped = of_mixture("teacher.fp8_skip=[0.mlp.experts]")
    assert skipped.parts["teacher"] == memory.parts["teacher"] + 128 * 3 * 2048 * 768


def test_precision_is_that_of_the_planned_device():
    auto = recipe("train.precision=auto", "teacher.dtype=auto")
    assert planned_precision(auto, find_device("H100")).compute == torch.bfloat16
    assert planned_precision(auto, find_device("cpu")).teacher == torch.float32


# ---------------------------------------------------------------- a teacher on disk


@pytest.mark.full
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("stored", [True, False], ids=["K tokens", "a head"])
def test_the_workspace_is_what_the_loss_takes(stored, frozen, kernel_device, watch):
    """Stored top-K needs no teacher logits: one set of buffers, where a head needs two."""
    rows, columns, hidden, made = 200, 300, 32, []

    class Watched(fused._Workspace):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            extra = [self.extra] if self.extra is not None and frozen else []  # else these lie where dW will
            self.bytes = sum(t.nbytes for t in (self.buffer, *extra)) + self.tile_sums[0][0]._base.nbytes
            made.append(self.bytes)

    watch.setattr(fused, "_Workspace", Watched)
    x, w, t, v = realistic_heads(rows, columns, hidden, hidden, dtype=torch.bfloat16, device=kernel_device)
    x.requires_grad_(True), w.requires_grad_(not frozen)
    if stored:
        ids = torch.arange(8, device=kernel_device).expand(rows, 8)
        loss = FusedTopKKLLoss()(x, w, ids, torch.full((rows, 8), -3.0, device=kernel_device))
    else:
        loss = FusedKLLoss()(x, w, t, v)
    loss.backward()
    precision = Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    available = device_facts(kernel_device).memory_bytes
    device = find_device("H100")._replace(memory_bytes=available)
    plan = device_plan(recipe(), device, 1)._replace(precision=precision)
    planned = memory._workspace(plan, rows, columns, 0 if frozen else w.nbytes, 1 if stored else 2)
    assert made == [planned]


@pytest.fixture
def states(tmp_path):
    """The manifest of a cache of hidden states, which is all that the arithmetic reads."""
    (tmp_path / "manifest.json").write_text(json.dumps({"kind": "hidden", "dtype": "bfloat16", "hidden": 4096}))
    return tmp_path


def test_a_cached_teacher_takes_what_is_stored_of_it(states):
    loaded = recipe("teacher.dtype=bfloat16")
    tokens = loaded.train.batch_size * loaded.data.max_length

    def of(path):
        cached = recipe("teacher.dtype=bfloat16", "teacher.type=cache", f"teacher.path={path}")
        return step_memory(device_plan(cached, find_device("H100"), 1))

    online = step_memory(device_plan(loaded, find_device("H100"), 1))
    k_tokens, hidden = of("not-made-yet"), of(states)
    assert k_tokens.parts["teacher"] == 0 and hidden.parts["teacher"] == 128_256 * 4096 * 2, "the head alone"
    assert online.parts["teacher"] == 2 * PUBLISHED["llama-3.1-8b"]
    assert hidden.parts["loss workspace"] == online.parts["loss workspace"] > k_tokens.parts["loss workspace"]
    assert k_tokens.logits_avoided == online.logits_avoided / 2 and hidden.logits_avoided == online.logits_avoided
    states_of_a_token = 4096 * 2
    assert hidden.parts["activations"] - online.parts["activations"] == tokens * states_of_a_token, "held twice"
    assert online.parts["activations"] - k_tokens.parts["activations"] == tokens * (states_of_a_token - 64 * 14)


# ---------------------------------------------------------------- the command


MINE = (
    "{teacher: {model: teacher}, student: {from_teacher: {layers: 2}}, data: {source: text.txt, max_length: 32, "
    "cache: false}, train: {epochs: 2, batch_size: 2}}"
)
pytestmark = pytest.mark.place(
    text="\n".join(f"line {i} of some text to learn" for i in range(100)),
    files={"mine.yaml": MINE},
    teacher={"layers": 4},
    other={"tokens": 270},
)


def test_check_prints_a_plan_and_succeeds(workplace, capsys):
    assert run_command(["check", "mine.yaml", "--gpu", "H100"]) == 0
    out = capsys.readouterr().out
    for expected in ("vocabularies match", " trained) in", "peak, in the", "s a step", "fits and can run"):
        assert expected in out, expected
    assert not Path("runs").exists()


def test_check_prints_its_report_as_json(workplace, capsys):
    assert run_command(["check", "mine.yaml", "--gpu", "A100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["vocabulary_ok"] and found["student"]["layers"] == 2
    assert found["steps"] > 2 and found["memory"]["peak"] == max(found["memory"]["moments"].values())


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["student={model: other}"], "student.model: teacher and student cannot be compared"),
        (["data.max_length=1024"], "data.max_length: expected at most 512, the teacher's longest sequence; got 1024"),
        (
            ["data.source=gone.jsonl"],
            "data.source: expected a local file or folder, python-stdlib or a hub id; 'gone.jsonl' does not exist",
        ),
        (["--gpu", "0.0001GB"], "memory: the peak of"),
    ],
)
def test_a_run_that_cannot_work_has_exit_code_1(arguments, problem, workplace, capsys):
    assert run_command(["check", "mine.yaml", *arguments]) == 1
    out = " ".join(capsys.readouterr().out.split())  # lines are broken at the terminal's width
    assert f"PROBLEM {problem}" in out and "verdict" not in out


def test_probe_needs_a_gpu(workplace, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_command(["check", "mine.yaml", "--probe"]) == 2
    assert "--probe: expected a CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_prediction_holds_on_this_gpu():
    from distill.commands.probe import probe

    small = parse(
        """
        teacher: {init: random, config: llama-3.2-1b, dtype: bfloat16}
        student: {init: random, config: smollm2-135m, dtype: float32}
        data: {source: synthetic, max_length: 2048}
        train: {steps: 2, batch_size: 4, precision: bfloat16}
        """
    )
    predicted = check_run(small, find_device(None), read_data=False).memory.peak
    assert probe(small).peak == pytest.approx(predicted, rel=0.1)


def test_tiny_configurations_of_every_kind_are_counted():
    for kind in ("llama", "gpt2", "cohere"):
        assert model_sizes(meta(tiny_config(kind))).parameters > 0
