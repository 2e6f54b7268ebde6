"""A teacher whose layers wait in host memory: the same numbers bit for bit, less on the device, or a clear refusal."""

import contextlib
import copy
import gc

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_run import PLACE, recipe
from test_trainer import arguments, history, rows, weights
from tiny import save_tiny, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from distill.models.layers import STREAMER, find_layers, is_offloaded, offloading_of
from distill.models.load.fingerprint import fingerprint
from distill.models.loading import load_student, load_teacher
from distill.models.patch.patching import patch, unpatch
from distill.models.precision.offload import offload_layers
from distill.recipe import LocalTeacherConfig, Student
from distill.run import run
from distill.training.error_translation import out_of_memory
from distill.training.trainer import DistillationTrainer

pytestmark = PLACE

CPU = torch.device("cpu")
IDS = torch.arange(3, 40)[None]


def frozen(**settings):
    return tiny_model(**({"layers": 5, "seed": 1} | settings)).requires_grad_(False)


def logits(model, ids=IDS):
    with torch.inference_mode():
        return model(input_ids=ids.to(model.device), use_cache=False).logits


# ---------------------------------------------------------------- the same numbers


@pytest.mark.plain("True-llama", "True-gpt2", "False-gpt2")
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("tie", [True, False])
def test_an_offloaded_model_equals_a_resident_one(kind, tie):
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
    streamer = model.__dict__["_distill_streamer"]
    blocks = {block.untyped_storage().data_ptr() for block in streamer.blocks}
    groups = enumerate(streamer.parameters)
    return [n for n, group in groups if any(p.untyped_storage().data_ptr() in blocks for p in group)]


def test_between_calls_its_weights_are_the_resident_ones():
    """Code that walks over a model sees it as usual: the lock file, a truncated student, its size."""
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
    unpatch(offloaded)
    streamer = offloaded.__dict__[STREAMER]
    begun = streamer.bring
    brought = []
    streamer.bring = lambda number: (brought.append(number), begun(number))
    torch.testing.assert_close(logits(offloaded), logits(resident), rtol=1e-5, atol=1e-5)
    assert brought == list(range(5)), "without our kernels its layers are still in host memory"
    assert "forward" not in offloaded.model.norm.__dict__


def test_layers_are_sent_ahead_each_once_a_pass_and_never_into_the_block_in_use(monkeypatch):
    model = offload_layers(frozen(), CPU)
    streamer, sent = model.__dict__["_distill_streamer"], []
    send = streamer._send

    def watched(number, block):
        sent.append((number, block, streamer.at))
        assert streamer.at is None or streamer.holds[block] != streamer.at
        send(number, block)

    monkeypatch.setattr(streamer, "_send", watched)
    for _ in range(3):
        logits(model)
    assert [number for number, _, _ in sent] == [0, *([1, 2, 3, 4, 0] * 3)]
    assert all(at == (number - 1) % 5 for number, _, at in sent[1:])  # while the layer before computes
    assert sum(map(len, streamer.blocks)) == 2 * max(map(len, streamer.host))


class Computing:
    """Stands for the stream that computes: it computes at once, and waits when it is told to."""

    def __init__(self):
        self.waited = 0

    def wait_stream(self, other):
        self.waited += 1
        other.catch_up()


class Copying:
    """Stands for a copying stream that is as late as it may be: nothing arrives before somebody waits for it."""

    def __init__(self):
        self.late, self.may_overwrite = [], False

    def wait_stream(self, other):
        self.may_overwrite = True  # what has been called by now has read what lies there

    def catch_up(self):
        for target, source in self.late:
            target.copy_(source)
        self.late.clear()

    @contextlib.contextmanager
    def __call__(self, stream):
        copying = self

        class Later(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                assert func is torch.ops.aten.copy_.default and copying.may_overwrite
                copying.late.append(args[:2])
                return args[0]

        with Later():
            yield
        self.may_overwrite = False


def test_computing_waits_for_what_arrives_as_late_as_it_may(monkeypatch):
    """The GPU's order of things, played on a CPU: it fails where either stream does not wait for the other."""
    resident = frozen()
    offloaded = offload_layers(copy.deepcopy(resident), CPU)
    computing, copying = Computing(), Copying()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.cuda, "stream", copying)
    streamer = offloaded.__dict__["_distill_streamer"]
    streamer.stream = copying
    for block in streamer.blocks:
        block.fill_(0x7F)  # NaN, should it be read
    for ids in (IDS, IDS.flip(1)):
        assert torch.equal(logits(offloaded, ids), logits(resident, ids))
    assert computing.waited == 10 and len(copying.late) == 1  # the first layer, for the next pass


class Runtime:
    """Stands for CUDA's: pins as many blocks as it may."""

    def __init__(self, most):
        self.most, self.pinned = most, {}

    def cudaHostRegister(self, pointer, size, flags):
        if len(self.pinned) == self.most:
            return 2
        self.pinned[pointer] = size
        return 0

    def cudaHostUnregister(self, pointer):
        del self.pinned[pointer]


@pytest.mark.plain("2")
@pytest.mark.parametrize("most", [5, 2])
def test_host_memory_is_pinned_where_it_lies_and_given_back(most, monkeypatch, caplog):
    runtime, waited = Runtime(most), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    model = offload_layers(frozen(), CPU)
    streamer = model.__dict__["_distill_streamer"]
    streamer._pin()
    blocks = {block.data_ptr(): len(block) for block in streamer.host[:most]}
    assert runtime.pinned == blocks and streamer.pinned is (most == 5)
    assert ("CUDA error 2" in caplog.text) is (most == 2)
    assert ("wait in pinned host memory" in offloading_of(model)) is (most == 5)
    del model, streamer
    gc.collect()
    assert runtime.pinned == {} and waited == [CPU]


def test_running_out_of_memory_names_it():
    error = RuntimeError("CUDA out of memory")
    assert "teacher.offload to cpu" in out_of_memory(recipe(), error)
    for given in ("teacher.offload=cpu", "teacher.dtype=fp8"):
        assert "teacher.offload" not in out_of_memory(recipe(given), error)


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
    offloaded.__dict__["_distill_streamer"].bring(0)
    assert on_the_device(offloaded) == [0]
    assert torch.equal(logits(offloaded), logits(resident))
    assert fingerprint(offloaded) == fingerprint(resident)


def test_a_weight_that_two_layers_share_stays_on_the_device():
    resident = frozen()
    layers = find_layers(resident)[1]
    layers[3].mlp.gate_proj = layers[1].mlp.gate_proj
    offloaded = offload_layers(copy.deepcopy(resident), CPU)
    shared = find_layers(offloaded)[1][1].mlp.gate_proj.weight
    streamer = offloaded.__dict__["_distill_streamer"]
    assert not any(shared is parameter for group in streamer.parameters for parameter in group)
    assert torch.equal(logits(offloaded), logits(resident))


@pytest.mark.plain("False")
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


@pytest.mark.full
def test_an_offloaded_run_logs_it_and_gives_the_same_result(workplace, capsys):
    plain = run(recipe(), name="plain")
    assert "offload" not in capsys.readouterr().out
    offloaded = run(recipe("teacher.offload=cpu"), name="offloaded")
    out = capsys.readouterr().out
    assert "offload     4 layers of the teacher" in out and "wait in host memory" in out
    assert offloaded.after == plain.after and offloaded.before == plain.before
    same = [load_teacher(LocalTeacherConfig(model=str(result.folder / "student"))) for result in (plain, offloaded)]
    assert fingerprint(same[0]) == fingerprint(same[1])


# ---------------------------------------------------------------- what it refuses


def test_an_offloaded_model_stays_where_it_is():
    model = offload_layers(frozen(), CPU)
    assert model.to("cpu") is model and model.to(device=CPU) is model
    assert model.to(torch.device("cpu", 0)) is model  # what accelerate calls it where there are several processes
    for wrong in (torch.bfloat16, "meta"):
        with pytest.raises(ValueError, match=r"teacher\.offload: expected an offloaded teacher to stay on"):
            model.to(wrong)
    with pytest.raises(ValueError, match="cannot be copied"):
        copy.deepcopy(model)


def test_what_cannot_be_offloaded_is_refused():
    with pytest.raises(ValueError, match=r"teacher\.offload: only a frozen model"):
        offload_layers(tiny_model(), CPU)
    model = frozen()
    model.model.layers = torch.nn.Sequential(*model.model.layers)
    with pytest.raises(ValueError, match=r"teacher\.offload: LlamaForCausalLM has no list of decoder layers"):
        offload_layers(model, CPU)


def test_a_loaded_section_is_offloaded_with_its_adapter_merged(tmp_path):
    teacher = frozen()
    save_tiny(tmp_path / "model", teacher)
    adapted = get_peft_model(
        copy.deepcopy(teacher), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapter")
    section = {"model": str(tmp_path / "model"), "adapter": str(tmp_path / "adapter")}
    resident, offloaded = (load_teacher(LocalTeacherConfig(**section, offload=how)) for how in (None, "cpu"))
    assert is_offloaded(offloaded) and not is_offloaded(resident) and offloading_of(resident) is None
    assert torch.equal(logits(offloaded), logits(resident))
    assert not torch.equal(logits(resident), logits(teacher))
    random = LocalTeacherConfig(init="random", config=str(tmp_path / "model" / "config.json"))
    drawn = load_teacher(random.model_copy(update={"offload": "cpu"}))
    assert is_offloaded(drawn) and torch.equal(logits(drawn), logits(load_teacher(random)))


def test_outputs_are_those_of_accelerates_offloading():
    """accelerate's hooks leave weights on the meta device; both are held to the resident model."""
    from accelerate import cpu_offload

    plain = frozen(tie=False)
    models = [plain, offload_layers(copy.deepcopy(plain), CPU), cpu_offload(copy.deepcopy(plain), CPU)]
    with torch.inference_mode():
        said = [model(input_ids=IDS, use_cache=False).logits for model in models]
    assert torch.equal(said[0], said[1]) and torch.equal(said[0], said[2])
    assert models[2].model.layers[0].mlp.gate_proj.weight.is_meta
    assert not any(parameter.is_meta for parameter in models[1].parameters())


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
        teacher = load_teacher(LocalTeacherConfig(model=larger, offload=how), device=cuda)
        said.append([logits(teacher, part).clone() for part in (ids, ids.flip(1), ids)])
        held.append(torch.cuda.max_memory_allocated() - before)
        if how is not None:
            streamer = teacher.__dict__["_distill_streamer"]
            assert streamer.pinned and all(block.is_pinned() for block in streamer.host)
            assert find_layers(teacher)[1][0].mlp.gate_proj.weight.device.type == "cpu"
            assert teacher.lm_head.weight.device == cuda == teacher.device
            waiting = sum(map(len, streamer.host))
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
        teacher = load_teacher(LocalTeacherConfig(model=larger, offload=how), device="cuda")
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
