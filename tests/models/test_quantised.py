"""Quantised teachers: checkpoints as they are, int8 when loaded, and refusals of what cannot be.

transformers' BitNet layers stand for all methods here: of those that need no other package they alone run on a CPU.
"""

import copy
import importlib.util
import json

import pytest
import torch
from test_run import PLACE
from test_run import recipe as run_recipe
from test_trainer import arguments, rows
from tiny import save_tiny, tiny_model
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.integrations.bitnet import AutoBitLinear

from distill.doctor.examine import prepare
from distill.models.flops import count_flops, parameters_of
from distill.models.load.fingerprint import fingerprint
from distill.models.load.source import ModelFiles
from distill.models.loading import load_student, load_teacher
from distill.models.patch.patching import patch
from distill.models.quantised_checkpoints import NF4, int8_arguments, quantised_by_transformers, stored_bits
from distill.planning.devices import find_device
from distill.planning.preflight import check_run
from distill.recipe import LocalTeacherConfig, Student, load
from distill.recipe.shipped import find_recipe
from distill.run import run
from distill.training.trainer import DistillationTrainer

pytestmark = PLACE

BITNET = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
IDS = torch.arange(3, 40)[None]
FOLDER, GGUF = ModelFiles("folder"), ModelFiles("folder", "model.gguf")


@pytest.fixture(autouse=True)
def _uncompiled():
    """BitNet's layers compile their rounding when they are first called; what it comes to is the same without."""
    with torch.compiler.set_stance("force_eager"):
        yield


def saved(folder, config, model=None):
    """A folder whose configuration says that its weights are quantised so."""
    save_tiny(folder, model if model is not None else tiny_model(layers=3, seed=1, tie=False))
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    return str(folder)


def learns(made):
    """Return whether training lowers the loss over all of its rows."""

    def over_all():
        with torch.no_grad():
            batch = made._prepare_inputs(made.data_collator(list(made.train_dataset)))
            return made.model(**made.objective.student_inputs(batch))["loss"].item()

    before = over_all()
    made.train()
    return over_all() < 0.9 * before


@pytest.fixture
def folder(tmp_path):
    return saved(tmp_path / "bitnet", BITNET | {"modules_to_not_convert": ["lm_head"]})


# ---------------------------------------------------------------- checkpoints that are quantised


def test_a_quantised_checkpoint_is_a_teacher(folder, tmp_path):
    teacher = load_teacher(LocalTeacherConfig(model=folder))
    assert quantised_by_transformers(teacher) and not any(p.requires_grad for p in teacher.parameters())
    assert type(teacher.model.layers[0].mlp.gate_proj) is AutoBitLinear and type(teacher.lm_head) is nn.Linear
    plain = tiny_model(layers=3, seed=1, tie=False)
    with torch.inference_mode():
        said, theirs = teacher(input_ids=IDS).logits, AutoModelForCausalLM.from_pretrained(folder)(input_ids=IDS).logits
        assert torch.equal(said, theirs) and not torch.allclose(said, plain(input_ids=IDS).logits, atol=0.1)
    student = tiny_model(seed=2)
    settings = arguments(tmp_path, max_steps=16, learning_rate=3e-3)
    assert learns(DistillationTrainer(student, teacher, settings, train_dataset=rows()))


def test_loss_of_a_quantised_teacher_equals_that_of_its_logits(folder, tmp_path):
    teacher, student = load_teacher(LocalTeacherConfig(model=folder)), tiny_model(seed=2)
    made = DistillationTrainer(student, teacher, arguments(tmp_path), train_dataset=rows())
    batch = made.data_collator([rows(1, ragged=False)[0]])
    ours = made.model(**made.objective.student_inputs(batch))["loss"].item()
    inputs = {name: batch[name] for name in ("input_ids", "position_ids") if name in batch}
    with torch.no_grad():
        made.objective.detach()
        p, q = (model(**inputs, use_cache=False).logits[0, :-1].double() for model in (teacher, student))
    each = F.kl_div(q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    assert ours == pytest.approx(each[batch["labels"][0, 1:] != -100].mean().item(), rel=1e-4)


@pytest.mark.full
def test_a_whole_run_with_it(workplace, capsys):
    saved(workplace / "bitnet", BITNET | {"modules_to_not_convert": ["lm_head"]})
    result = run(run_recipe("teacher.model=bitnet", "student={model: student}"))
    assert result.after.forward_kl < result.before.forward_kl
    assert "quantised   linear layers of the teacher by bitnet, except its head" in capsys.readouterr().out


def test_parameter_count_is_that_of_the_unquantised_model(folder):
    """Whatever its layers keep: packed weights would count as fewer, buffers not at all."""
    teacher, plain = (
        load_teacher(LocalTeacherConfig(model=folder)),
        tiny_model(layers=3, tie=False).requires_grad_(False),
    )
    for layer in teacher.model.layers:  # as GPTQ's layers keep them
        gate = layer.mlp.gate_proj
        packed = gate.weight.detach()[:, ::8].to(torch.int32)
        del gate.weight
        gate.register_buffer("qweight", packed)
    assert parameters_of(teacher) == (parameters_of(plain)[0], 0)
    assert count_flops(teacher, trains=False) == count_flops(plain, trains=False)


def test_the_lock_sees_weights_that_are_buffers(folder):
    teacher = load_teacher(LocalTeacherConfig(model=folder))
    teacher.model.layers[0].register_buffer("scales", torch.ones(3))
    before = fingerprint(teacher)
    assert fingerprint(teacher) == before
    teacher.model.layers[0].scales[1] = 2.0
    assert fingerprint(teacher) != before


class Int8Linear(nn.Module):
    """Stands for layers that keep integers: no floating-point parameter to learn the model's dtype from."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


def test_our_kernels_go_around_quantised_layers():
    model = tiny_model(dtype=torch.bfloat16).requires_grad_(False)
    for parent in list(model.model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Int8Linear(child))
    untouched = copy.deepcopy(model)
    report = patch(model, "teacher", attention=None)
    assert report.swapped["rms_norm"] == 5 and report.swapped["rope"] == 2
    with torch.inference_mode():
        ours, theirs = model(input_ids=IDS).logits.float(), untouched(input_ids=IDS).logits.float()
    assert (ours - theirs).abs().max() <= 16 * torch.finfo(torch.bfloat16).eps * theirs.abs().max()


# ---------------------------------------------------------------- refusals


def test_a_quantised_head_is_refused(tmp_path):
    model = saved(tmp_path / "head", BITNET | {"modules_to_not_convert": []})
    with pytest.raises(ValueError, match=r"teacher\.model: the head of .* is quantised too.*AutoBitLinear"):
        load_teacher(LocalTeacherConfig(model=model))


def test_a_student_is_never_quantised(folder):
    with pytest.raises(ValueError, match=r"student\.model: .* is quantised \(bitnet\), and a student is trained"):
        load_student(Student(model=folder))
    teacher = load_teacher(LocalTeacherConfig(model=folder))
    with pytest.raises(ValueError, match=r"student\.from_teacher: layers cannot be cut out of a quantised teacher"):
        load_student(Student(from_teacher={"layers": 1}), teacher=teacher)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "fp8"}, r"teacher\.dtype: .* is quantised already \(bitnet\)"),
        ({"adapter": "somewhere"}, r"teacher\.adapter: .* an adapter cannot be merged"),
        ({"offload": "cpu"}, r"teacher\.offload: cpu needs weights in floating point"),
    ],
)
def test_what_a_quantised_teacher_cannot_be_as_well(folder, settings, message):
    with pytest.raises(ValueError, match=message):
        load_teacher(LocalTeacherConfig(model=folder, **settings))


def test_a_method_whose_package_is_missing_is_named(tmp_path):
    if importlib.util.find_spec("optimum"):
        pytest.skip("the package is here")
    with pytest.raises(ValueError, match=r"teacher\.model: cannot load .*: it is quantised \(gptq\): .*pip install"):
        load_teacher(LocalTeacherConfig(model=saved(tmp_path / "gptq", GPTQ)))


def test_the_doctor_refuses_it(workplace):
    saved(workplace / "bitnet", BITNET | {"modules_to_not_convert": ["lm_head"]})
    with pytest.raises(ValueError, match=r"teacher\.model: expected a model in floating point"):
        prepare(run_recipe("teacher.model=bitnet", "student={model: student}"))


# ---------------------------------------------------------------- int8 when loaded


def test_int8_asks_for_a_gpu_and_the_package(folder, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"teacher\.dtype: int8 needs a CUDA GPU, and this run is on a CPU"):
        load_teacher(LocalTeacherConfig(model=str(save_tiny(tmp_path / "plain")), dtype="int8"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs bitsandbytes, which is not installed; install it: pip install"):
        int8_arguments(FOLDER.gguf_file, torch.device("cuda"), "teacher")
    with pytest.raises(ValueError, match=r"for a \.gguf file use fp8"):
        int8_arguments(GGUF.gguf_file, torch.device("cuda"), "teacher")


def test_int8_leaves_out_the_head_by_what_it_is(monkeypatch):
    from transformers.quantizers.quantizers_utils import should_convert_module

    try:
        from transformers.quantizers.base import get_keys_to_not_convert
    except ImportError:
        from transformers.quantizers.quantizers_utils import get_keys_to_not_convert
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    settings = int8_arguments(FOLDER.gguf_file, torch.device("cuda"), "teacher")["quantization_config"]
    assert settings.load_in_8bit and settings.llm_int8_skip_modules is None
    for tie in (True, False):
        kept = get_keys_to_not_convert(tiny_model(tie=tie))
        assert not should_convert_module("lm_head", kept)
        assert should_convert_module("model.layers.0.mlp.gate_proj", kept)


# ---------------------------------------------------------------- what check says


def looked_at(*overrides, gpu="H100"):
    return check_run(load(find_recipe("llama3-8b-to-1b"), overrides), find_device(gpu), read_data=False)


def test_check_counts_one_byte_a_weight_but_head_and_embedding():
    plain, int8, fp8 = looked_at(), looked_at("teacher.dtype=int8"), looked_at("teacher.dtype=fp8")
    shape = plain.teacher
    assert int8.memory.parts["teacher"] == 2 * shape.parameters - shape.linear == fp8.memory.parts["teacher"]
    assert "loading of the teacher" not in int8.memory.moments  # it is quantised tensor by tensor as it is read
    assert looked_at("teacher.dtype=int8", gpu="cpu").problems[-1] == (
        "teacher.dtype: int8 needs a CUDA GPU; use bfloat16 or auto"
    )


@pytest.mark.plain(
    "{'quant_method': 'bitsandbytes', 'load_in_8bit': True}-8.0", "{'quant_method': 'something new'}-None"
)
@pytest.mark.parametrize(
    ("config", "bits"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8.0),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, NF4),
        (GPTQ, 4 + 20 / 128),
        ({"quant_method": "fp8"}, 8.0),
        ({"quant_method": "something new"}, None),
    ],
)
def test_check_counts_a_checkpoint_by_its_own_bits(workplace, config, bits):
    assert stored_bits(config) == bits
    saved(workplace / "few", config)
    report = check_run(
        run_recipe("teacher.model=few", "student={model: student}"), find_device("H100"), read_data=False
    )
    shape = report.teacher
    assert shape.stored_bits == bits and not report.problems
    saved_bytes = 0 if bits is None else shape.linear * (2 - bits / 8)
    assert report.memory.parts["teacher"] == 2 * shape.parameters - saved_bytes


@pytest.mark.full
def test_check_reports_quantised_models_that_cannot_be_used(workplace):
    saved(workplace / "few", GPTQ)
    for overrides, message in (
        (["teacher.model=few"], "student.from_teacher: the teacher is quantised (gptq)"),
        (["student={model: few}"], "student.model: few is quantised (gptq), and a student is trained"),
        (["teacher={model: few, dtype: fp8}", "student={model: student}"], "teacher.dtype: few is quantised already"),
        (["teacher={model: few, offload: cpu}", "student={model: student}"], "teacher.offload: cpu needs weights in"),
    ):
        report = check_run(run_recipe(*overrides), find_device("H100"), read_data=False)
        assert any(problem.startswith(message) for problem in report.problems), (message, report.problems)


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_int8_on_a_gpu_moves_the_teacher_little_and_takes_half(tmp_path):
    pytest.importorskip("bitsandbytes")
    model = tiny_model(layers=8, hidden=512, intermediate_size=2048, tie=False, dtype=torch.bfloat16)
    name, ids = str(save_tiny(tmp_path / "larger", model)), torch.randint(3, 259, (2, 128), device="cuda")
    said, sizes = [], []
    for dtype in ("bfloat16", "int8"):
        before = torch.cuda.memory_allocated()
        teacher = load_teacher(LocalTeacherConfig(model=name, dtype=dtype), device="cuda")
        sizes.append(torch.cuda.memory_allocated() - before)
        with torch.inference_mode():
            said.append(teacher(input_ids=ids, use_cache=False).logits.float().log_softmax(-1))
        assert parameters_of(teacher)[0] == sum(p.numel() for p in model.parameters())
    assert type(teacher.model.layers[0].mlp.gate_proj).__name__ == "Linear8bitLt" and type(teacher.lm_head) is nn.Linear
    moved = F.kl_div(said[1], said[0], log_target=True, reduction="batchmean") / ids.shape[1]
    entropy = -(said[0].exp() * said[0]).sum(-1).mean()
    assert 0 < moved < 0.1 * entropy
    assert sizes[1] < 0.7 * sizes[0]
    report = patch(teacher, "teacher")
    assert report.swapped["rms_norm"] == 17
    student = tiny_model(seed=2).cuda()
    settings = arguments(tmp_path, use_cpu=False, max_steps=16, learning_rate=3e-3)
    assert learns(DistillationTrainer(student, teacher, settings, train_dataset=rows()))
