"""A teacher whose layers wait in host memory: the same numbers bit for bit, less on the device, or a clear refusal."""

import copy
import gc

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_run import recipe, workplace  # noqa: F401  (a fixture)
from test_trainer import arguments, history, rows, weights
from tiny import save_tiny, tiny_model

from distill.lock import fingerprint
from distill.models.compiling import compile_layers
from distill.models.load import load_student, load_teacher
from distill.models.offload import is_offloaded, offload_layers, offloading_of
from distill.models.patching import patch
from distill.models.pruning import find_layers
from distill.planning.devices import find_device
from distill.planning.memory import GIB, shape_of
from distill.planning.preflight import check, meta_models
from distill.planning.step_time import SUSTAINED
from distill.planning.teacher_weights import PCIE_5, REACHED
from distill.recipe import RecipeError, Student, Teacher, load, parse
from distill.recipe.shipped import find_recipe
from distill.run import run
from distill.training.trainer import DistillationTrainer

CPU = torch.device("cpu")
IDS = torch.arange(3, 40)[None]


def frozen(**settings):
    return tiny_model(**({"layers": 5, "seed": 1} | settings)).requires_grad_(False)


def logits(model, ids=IDS):
    with torch.inference_mode():
        return model(input_ids=ids.to(model.device), use_cache=False).logits


# ---------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("tie", [True, False])
def test_an_offloaded_model_says_what_a_resident_one_says(kind, tie):
    resident = frozen(kind=kind, tie=tie)
    offloaded = offload_layers(copy.deepcopy(resident), CPU)
    for ids in (IDS, IDS.flip(1), IDS[:, :4]):  # more than once: the blocks are used again
        assert torch.equal(logits(offloaded, ids), logits(resident, ids))
    asked = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(offloaded.generate(IDS[:, :4], **asked), resident.generate(IDS[:, :4], **asked))
    with torch.no_grad():  # outside of inference mode as well
        assert torch.equal(offloaded(input_ids=IDS).logits, resident(input_ids=IDS).logits)


def on_the_device(model):
    """Layers whose parameters lie in the device's blocks now."""
    conveyor = model.__dict__["_distill_conveyor"]
    blocks = {block.untyped_storage().data_ptr() for block in conveyor.blocks}
    groups = enumerate(conveyor.parameters)
    return [n for n, group in groups if any(p.untyped_storage().data_ptr() in blocks for p in group)]


def test_between_calls_its_weights_are_the_resident_ones():
    """What walks over a model finds nothing unusual: the lock, a student cut from it, its size."""
    resident = frozen()
    offloaded = offload_layers(copy.deepcopy(resident), CPU)
    logits(offloaded)
    assert on_the_device(offloaded) == []
    assert fingerprint(offloaded) == fingerprint(resident)
    assert offloaded.state_dict().keys() == resident.state_dict().keys()
    section = Student(from_teacher={"layers": 2})
    cut = load_student(section, teacher=offloaded)
    assert fingerprint(cut) == fingerprint(load_student(section, teacher=resident))
    with torch.no_grad():
        for parameter in cut.parameters():
            parameter.add_(1.0)
    assert fingerprint(offloaded) == fingerprint(resident)


def test_our_kernels_go_into_an_offloaded_model():
    resident = frozen(kind="llama")
    offloaded = offload_layers(copy.deepcopy(resident), CPU)
    report = patch(offloaded, "teacher", attention=None)
    assert report.swapped["rms_norm"] == 11 and report.swapped["glu"] == 5 and report.swapped["rope"] == 5
    assert "LlamaDecoderLayer" in report.left  # whose forward is the hook's
    plain = patch(resident, "teacher", attention=None)
    assert plain.swapped["residual_norm"] == 5
    torch.testing.assert_close(logits(offloaded), logits(resident), rtol=1e-5, atol=1e-5)


def test_layers_are_sent_ahead_each_once_a_pass_and_never_into_the_block_in_use(monkeypatch):
    model = offload_layers(frozen(), CPU)
    conveyor, sent = model.__dict__["_distill_conveyor"], []
    send = conveyor._send

    def watched(number, block):
        sent.append((number, block, conveyor.at))
        assert conveyor.at is None or conveyor.holds[block] != conveyor.at
        send(number, block)

    monkeypatch.setattr(conveyor, "_send", watched)
    for _ in range(3):
        logits(model)
    assert [number for number, _, _ in sent] == [0, *([1, 2, 3, 4, 0] * 3)]
    assert all(at == (number - 1) % 5 for number, _, at in sent[1:])  # while the layer before computes
    assert sum(map(len, conveyor.blocks)) == 2 * max(map(len, conveyor.host))


def test_a_pass_that_fails_leaves_it_whole():
    resident = frozen()
    offloaded = offload_layers(copy.deepcopy(resident), CPU)
    layer = find_layers(offloaded)[1][2]

    def fail(module, inputs):
        raise RuntimeError("out of something")

    handle = layer.mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of something"):
        logits(offloaded)
    handle.remove()
    assert on_the_device(offloaded) == [2]
    offloaded.__dict__["_distill_conveyor"].bring(0)
    assert on_the_device(offloaded) == [0]
    assert torch.equal(logits(offloaded), logits(resident))
    assert fingerprint(offloaded) == fingerprint(resident)


def test_a_weight_that_two_layers_share_stays_on_the_device():
    resident = frozen()
    layers = find_layers(resident)[1]
    layers[3].mlp.gate_proj = layers[1].mlp.gate_proj
    offloaded = offload_layers(copy.deepcopy(resident), CPU)
    shared = find_layers(offloaded)[1][1].mlp.gate_proj.weight
    conveyor = offloaded.__dict__["_distill_conveyor"]
    assert not any(shared is parameter for group in conveyor.parameters for parameter in group)
    assert torch.equal(logits(offloaded), logits(resident))


@pytest.mark.parametrize("lora", [False, True])
def test_training_against_it_is_the_same_bit_for_bit(tmp_path, lora):
    after = []
    for offload in (False, True):
        teacher, student = frozen(), tiny_model(seed=2)
        if lora:
            torch.manual_seed(0)
            student = get_peft_model(student, LoraConfig(r=4, target_modules="all-linear"))
        if offload:
            offload_layers(teacher, CPU)
        made = DistillationTrainer(student, teacher, arguments(tmp_path), train_dataset=rows())
        made.train()
        assert is_offloaded(teacher) is offload
        after.append((weights(made.model), history(made, "loss")))
    assert after[0][1] == after[1][1] and len(after[0][1]) == 4
    assert all(torch.equal(value, after[1][0][name]) for name, value in after[0][0].items())


def test_a_run_says_what_is_offloaded_and_comes_to_the_same(workplace, capsys):  # noqa: F811
    plain = run(recipe(), name="plain")
    assert "offload" not in capsys.readouterr().out
    offloaded = run(recipe("teacher.offload=cpu"), name="offloaded")
    out = capsys.readouterr().out
    assert "offload     4 layers of the teacher" in out and "wait in host memory" in out
    assert offloaded.after == plain.after and offloaded.before == plain.before
    same = [load_teacher(Teacher(model=str(result.folder / "student"))) for result in (plain, offloaded)]
    assert fingerprint(same[0]) == fingerprint(same[1])


# ---------------------------------------------------------------- what it refuses


def test_an_offloaded_model_stays_where_it_is():
    model = offload_layers(frozen(), CPU)
    assert model.to("cpu") is model and model.to(device=CPU) is model
    for wrong in (torch.bfloat16, "meta"):
        with pytest.raises(ValueError, match=r"teacher\.offload: an offloaded teacher stays as it is"):
            model.to(wrong)
    with pytest.raises(ValueError, match="cannot be copied"):
        copy.deepcopy(model)
    assert compile_layers(model) == 0


def test_what_cannot_be_offloaded_is_refused():
    with pytest.raises(ValueError, match=r"teacher\.offload: only a frozen model"):
        offload_layers(tiny_model(), CPU)
    model = frozen()
    model.model.layers = torch.nn.Sequential(*model.model.layers)
    with pytest.raises(ValueError, match=r"teacher\.offload: LlamaForCausalLM has no list of decoder layers"):
        offload_layers(model, CPU)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["teacher={model: t, offload: cpu, dtype: fp8}"], "offload: cpu works with weights in 16 or 32 bits"),
        (["teacher={model: t, offload: cpu, dtype: int8}"], "offload: cpu works with weights in 16 or 32 bits"),
        (["teacher={type: cache, path: c, offload: cpu}"], "offload: cpu has no meaning with type: cache"),
        (["teacher.offload=cpu", "parallel.teacher=sharded"], "two ways of holding it"),
        (["teacher.offload=disk"], "cpu"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(overrides, message):
    with pytest.raises(RecipeError, match=message):
        recipe(*overrides)


def test_several_teachers_are_not_offloaded():
    text = """
        teachers: [{model: a, offload: cpu}, {model: b}]
        student: {model: s}
        data: {source: text.txt, max_length: 32}
        train: {steps: 1}
    """
    with pytest.raises(RecipeError, match="offload: cpu works for one teacher only"):
        parse(text)


def test_a_loaded_section_is_offloaded_with_its_adapter_merged(tmp_path):
    teacher = frozen()
    save_tiny(tmp_path / "model", teacher)
    adapted = get_peft_model(
        copy.deepcopy(teacher), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapter")
    section = {"model": str(tmp_path / "model"), "adapter": str(tmp_path / "adapter")}
    resident, offloaded = (load_teacher(Teacher(**section, offload=how)) for how in (None, "cpu"))
    assert is_offloaded(offloaded) and not is_offloaded(resident) and offloading_of(resident) is None
    assert torch.equal(logits(offloaded), logits(resident))
    assert not torch.equal(logits(resident), logits(teacher))
    random = Teacher(init="random", config=str(tmp_path / "model" / "config.json"))
    drawn = load_teacher(random.model_copy(update={"offload": "cpu"}))
    assert is_offloaded(drawn) and torch.equal(logits(drawn), logits(load_teacher(random)))


# ---------------------------------------------------------------- what check says


def looked_at(*overrides, gpu="H100", gpus=1, name="llama3-8b-to-1b"):
    return check(load(find_recipe(name), overrides), find_device(gpu), gpus=gpus, look_at_data=False)


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
    shape = shape_of(model)
    conveyor = offload_layers(model, CPU).__dict__["_distill_conveyor"]
    padding = 256 * sum(map(len, conveyor.parameters))
    assert 4 * shape.layered <= sum(map(len, conveyor.host)) <= 4 * shape.layered + padding
    assert 4 * shape.largest_layer <= max(map(len, conveyor.host)) <= 4 * shape.largest_layer + padding


def test_the_time_is_the_slower_of_arithmetic_and_bus():
    """With many tokens a micro-batch the teacher's arithmetic hides its travelling, with few it does not."""
    many = [looked_at(*more) for more in ((), ("teacher.offload=cpu",))]
    assert many[1].seconds_per_step >= many[0].seconds_per_step
    few = [
        looked_at("train.batch_size=1", "data.max_length=256", "train.tokens_per_step=65536", *more)
        for more in ((), ("teacher.offload=cpu",))
    ]
    assert few[1].accumulation == 256
    bus = 256 * few[1].host / (REACHED * PCIE_5)
    assert few[1].seconds_per_step > bus > few[0].seconds_per_step
    student = few[1].seconds_per_step - bus  # arithmetic of the student alone
    assert 0 < student < few[0].seconds_per_step
    assert student * find_device("H100").flops * SUSTAINED < few[1].flops_per_step
    assert looked_at("teacher.offload=cpu", gpu="24GB").seconds_per_step is None  # a rate that nobody knows


def test_check_offers_it_with_what_it_saves_and_crosses():
    report = looked_at(gpu="24GB")
    (row,) = [row for row in report.advice if row[0].startswith("teacher.offload=cpu")]
    saved = looked_at("teacher.offload=cpu", gpu="24GB").memory.peak
    assert row[1] == pytest.approx((report.memory.peak - saved) / GIB)
    assert f"{2 * report.teacher.layered / GIB:.1f} GiB cross the bus" in row[0]
    for given in ("teacher.offload=cpu", "teacher.dtype=fp8"):
        assert not any(label.startswith("teacher.offload") for label, _, _ in looked_at(given, gpu="24GB").advice)


def test_an_offloaded_teacher_is_never_sharded():
    few = {"name": "llama3-70b-to-8b-lora", "gpus": 2}
    assert "teacher sharded" in looked_at(**few).strategy
    report = looked_at("teacher.offload=cpu", **few)
    assert "teacher sharded" not in report.strategy and report.ok
    assert "teacher sharded" not in looked_at("teacher.dtype=int8", **few).strategy


def test_70b_of_a_teacher_fits_one_gpu_when_it_is_offloaded():
    teacher, _ = meta_models(load(find_recipe("llama3-70b-to-8b-lora")))
    report = looked_at("teacher.offload=cpu", name="llama3-70b-to-8b-lora")
    assert report.fits and report.host > 0.95 * 2 * shape_of(teacher).layered
    assert not looked_at(name="llama3-70b-to-8b-lora").fits


# ---------------------------------------------------------------- on a GPU


@pytest.fixture
def larger(tmp_path):
    """A model of some 280 MB in bfloat16, most of it in its layers, as a folder."""
    model = tiny_model(layers=12, hidden=1024, intermediate_size=4096, dtype=torch.bfloat16)
    return str(save_tiny(tmp_path / "larger", model))


@pytest.mark.gpu
def test_on_a_gpu_the_outputs_are_the_same_and_the_memory_is_less(larger):
    cuda, ids = torch.device("cuda", 0), torch.randint(3, 259, (2, 512))
    said, held = [], []
    for how in (None, "cpu"):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        teacher = load_teacher(Teacher(model=larger, offload=how), device=cuda)
        said.append([logits(teacher, part).clone() for part in (ids, ids.flip(1), ids)])
        held.append(torch.cuda.max_memory_allocated() - before)
        if how is not None:
            conveyor = teacher.__dict__["_distill_conveyor"]
            assert conveyor.pinned and all(block.is_pinned() for block in conveyor.host)
            assert find_layers(teacher)[1][0].mlp.gate_proj.weight.device.type == "cpu"
            assert teacher.lm_head.weight.device == cuda == teacher.device
            waiting = sum(map(len, conveyor.host))
        del teacher
    assert all(torch.equal(a, b) for a, b in zip(*said, strict=True))
    assert held[1] < held[0] - 0.7 * waiting


@pytest.mark.gpu
def test_on_a_gpu_training_is_the_same_while_layers_travel(larger, tmp_path):
    """Steps without a synchronisation between them: a copy that came too early would show in every gradient.

    SGD, whose steps follow the gradients' own rounding; the student's are summed in no fixed order.
    """
    settings = {"use_cpu": False, "max_steps": 12, "logging_steps": 12, "optim": "sgd", "learning_rate": 0.1}
    after = []
    for how in (None, "cpu"):
        teacher = load_teacher(Teacher(model=larger, offload=how), device="cuda")
        student = tiny_model(seed=2, dtype=torch.float32).cuda()
        made = DistillationTrainer(student, teacher, arguments(tmp_path, **settings), train_dataset=rows(32))
        made.train()
        after.append(weights(made.model))
        del teacher, made
        gc.collect()
    for name, value in after[0].items():
        torch.testing.assert_close(after[1][name], value, rtol=1e-3, atol=1e-4)
    start = weights(tiny_model(seed=2).cuda())
    assert any((value - start[name]).abs().max() > 1e-2 for name, value in after[0].items())
