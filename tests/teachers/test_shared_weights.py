"""One copy of a checkpoint that teacher and student hold frozen: less memory, and the same run to the last bit."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from tiny import save_tiny, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, TrainingArguments
from two_ranks import run_as_two

from distill.models.adapters import add_lora, save_adapter
from distill.models.head import unwrap_peft
from distill.models.load.shared_weights import shared_among
from distill.models.loading import load_teacher
from distill.models.patch.patching import patch
from distill.planning.cache_memory import caching_memory
from distill.planning.device_plan import device_plan
from distill.planning.devices import Device
from distill.planning.memory import step_memory
from distill.recipe import LocalTeacherConfig, Lora, parse
from distill.recipe.teachers import loaded_section
from distill.run import run
from distill.teachers.backends.local import LoadedTeacher
from distill.teachers.backends.student import FILE, AveragedTeacher
from distill.teachers.load_context import load_context
from distill.teachers.opening import open_pair
from distill.teachers.registry import source_of
from distill.teachers.rows.context.teacher import ContextTeacher
from distill.training.trainer import DistillationTrainer

RECIPE = """
teacher: {model: base, context: {template: 'Know that {hint}'}}
student: {model: base, lora: {r: 4, alpha: 16, dropout: 0.1}}
data: {source: chat.jsonl, max_length: 192, cache: false}
train: {steps: 6, batch_size: 2, tokens_per_step: 768, learning_rate: 1e-2, device: cpu, log_every: 1}
generate: {prompts: []}
"""
ITSELF = "teacher={type: student, context: {template: 'Know that {hint}'}}"
# the same files in another folder, which are loaded a second time
COPY = "teacher={model: copy, context: {template: 'Know that {hint}'}}"
AVERAGED = "teacher={type: student, ema: 0.7, context: {template: 'Know that {hint}'}}"


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = tiny_tokenizer()
    save_tiny(tmp_path / "base", tiny_model(tokenizer, hidden=64, seed=1), tokenizer)
    shutil.copytree(tmp_path / "base", tmp_path / "copy")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is it, for the time {number}?"},
                {"role": "assistant", "content": f"It is {'so ' * (number % 4)}nine."},
            ],
            "hint": f"The sum of four and five is nine. {number}",
        }
        for number in range(24)
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def recipe(*overrides):
    return parse(RECIPE, overrides, name="tiny")


def opened(*overrides):
    source = source_of(recipe(*overrides))
    return open_pair(source, source.vocabulary(), load_context(source.recipe))


def weight_bytes(pair):
    """Return the bytes of all weights, storages that several parameters lie in counted once, and of the adapters."""
    parameters = [(name, p) for _, model in pair.models() for name, p in model.named_parameters()]
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for _, p in parameters}
    return sum(storages.values()), sum(p.nbytes for name, p in parameters if "lora_" in name)


def figures(folder):
    """Return the losses of each step, the held-out figures and the trained weights of a run."""
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [(step["step"], name, step[name]) for step in steps for name in ("loss", "grad_norm") if name in step]
    result = json.loads((folder / "result.json").read_text())
    return losses, result["before"], result["after"], load_file(folder / "adapter/adapter_model.safetensors")


def assert_same(one, other):
    assert len(one[0]) >= 10 and one[0] == other[0]
    assert one[1:3] == other[1:3]
    assert one[3].keys() == other[3].keys()
    assert any(tensor.any() for name, tensor in one[3].items() if "lora_B" in name), "the adapters are trained"
    assert all(torch.equal(tensor, other[3][name]) for name, tensor in one[3].items())


FORMATS = {
    "float32": ["train.precision=float32"],
    "bfloat16": ["train.precision=bfloat16"],
    "nf4": ["teacher.dtype=nf4", "student.dtype=nf4"],
}


@pytest.mark.full
@pytest.mark.parametrize("settings", FORMATS.values(), ids=FORMATS.keys())
def test_half_the_weights_and_the_same_run(workplace, settings):
    """Held against a run whose teacher is read from a copy of the files."""
    two, adapters = weight_bytes(opened(COPY, *settings))
    for override in (ITSELF, "teacher.model=./base"):
        pair = opened(override, *settings)
        one, _ = weight_bytes(pair)
        assert one - adapters == (two - adapters) / 2 and one <= 0.55 * two + adapters
        assert pair.sharing.startswith("teacher and student hold one copy of")
        assert not any(p.requires_grad for p in pair.teacher.models["teacher"].parameters())
    assert_same(*(figures(run(recipe(own, *settings), name=name).folder) for name, own in (("a", ITSELF), ("b", COPY))))


def adapters_of(model):
    return {name: p for name, p in unwrap_peft(model).named_parameters() if "lora_" in name}


SETTINGS = {
    "checkpointing": ["train.gradient_checkpointing=true"],
    "rollouts": ["data.on_policy={max_new_tokens: 8}", "loss.terms=[{type: reverse_kl}]", "student.lora.dropout=0"],
    "adapted head": ["student.lora={r: 4, head: true}", "train.precision=bfloat16"],
    "rows alone": ["data.packing=false", "loss.terms=[{type: jsd}, {type: cross_entropy, weight: 0.3}]"],
    "store": ["teacher.online_cache=stored-NAME"],
    "top k": ["teacher.online_cache=top-NAME", "teacher.online_cache_format=top_k", "teacher.top_k=8"],
}


@pytest.mark.full
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_the_same_run_with(workplace, settings):
    one, two = (
        run(recipe(override, *(text.replace("NAME", name) for text in settings)), name=name).folder
        for name, override in (("one", ITSELF), ("two", COPY))
    )
    assert_same(figures(one), figures(two))


STEPS = 3


def trained(pair, rows, folder):
    """Return the losses and the adapters of some steps, with the run's optimizer settings."""
    arguments = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=1,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = DistillationTrainer(pair.student, pair.teacher, arguments, loss="jsd", train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: p.detach().clone() for name, p in adapters_of(pair.student).items()}


@pytest.mark.full
def test_kernels_in_both_models_change_nothing_of_it(workplace, kernel_device):
    """Our kernels replace the forwards of both models: the teacher's plain layers, the student's adapted ones."""
    found = []
    for override in (ITSELF, COPY):
        given = recipe("train.precision=bfloat16", "student.lora.dropout=0", "data.max_length=160", override)
        source = source_of(given)
        vocabulary = source.vocabulary()
        rows = vocabulary.read(given.data, 0).train
        pair = open_pair(source, vocabulary, load_context(given))
        assert bool(pair.sharing) is (override is ITSELF)
        reports = [patch(pair.teacher.models["teacher"], "teacher", attention=None)]
        reports.append(patch(pair.student, "student", attention=None))
        assert reports[0].swapped["glu"] == 2 and "lora" not in reports[0].swapped
        assert reports[1].swapped["lora"] == 14
        found.append(trained(pair, rows, workplace / "out"))
    (losses, weights), (expected, copied) = found
    assert len(losses) == STEPS and losses == expected and len(set(losses)) == STEPS
    assert all(torch.equal(tensor, copied[name]) for name, tensor in weights.items())


@pytest.mark.plain(
    "['train.precision=bfloat16', 'student.dtype=float32']-the teacher is in bfloat16, the student in float32",
    "['teacher.offload=cpu']-teacher.offload: cpu",
    "['teacher.attention=eager']-teacher.attention is eager, student.attention auto",
)
@pytest.mark.parametrize(
    "overrides, reason",
    [
        (["train.precision=bfloat16", "student.dtype=float32"], "the teacher is in bfloat16, the student in float32"),
        (["teacher.dtype=fp8"], "teacher.dtype: fp8"),
        (["teacher.offload=cpu"], "teacher.offload: cpu"),
        (["student.quantise={format: q8_0}", "student.lora.dropout=0"], "student.quantise"),
        (["teacher.attention=eager"], "teacher.attention is eager, student.attention auto"),
    ],
)
def test_why_a_student_has_its_own_copy_is_said(workplace, overrides, reason):
    pair = opened(*overrides)
    assert pair.sharing == f"the student holds its own copy of a teacher's checkpoint: {reason}"
    assert shared_among(dict(pair.models())).holders == []


@pytest.mark.parametrize("overrides", [["student.lora=null"], [COPY]], ids=["trained", "other files"])
def test_weights_that_cannot_be_shared_are_not_spoken_of(workplace, overrides):
    pair = opened(*overrides)
    assert pair.sharing == ""
    assert shared_among(dict(pair.models())).holders == []


@pytest.mark.parametrize("override", [ITSELF, AVERAGED], ids=["frozen", "averaged"])
def test_memory_is_planned_as_it_is_held(workplace, override):
    plan = device_plan(recipe("train.precision=bfloat16", override), Device("a GPU", 80 * 2**30, "hopper", True), 1)
    planned = step_memory(plan).parts
    held, _ = weight_bytes(opened("train.precision=bfloat16", override))
    assert planned["teacher"] + planned["student"] == held


def test_memory_is_planned_once(workplace):
    device = Device("a GPU", 80 * 2**30, "hopper", True)
    one, two = (
        step_memory(device_plan(recipe("train.precision=bfloat16", override), device, 1)) for override in (ITSELF, COPY)
    )
    assert one.parts["teacher"] == two.parts["teacher"] == one.shared and two.shared == 0
    assert two.peak - one.peak == one.shared
    assert {name: size for name, size in one.parts.items() if name != "student"} == {
        name: size for name, size in two.parts.items() if name != "student"
    }
    caching = [
        caching_memory(device_plan(recipe("train.precision=bfloat16", own), device, 1)) for own in (ITSELF, COPY)
    ]
    assert caching[1] - caching[0] == one.shared
    sharded = step_memory(device_plan(recipe(ITSELF), device, 2), sharded=True)
    assert sharded.shared == 0, "shards of the student are not the teacher's whole weights"


@pytest.mark.full
def test_two_processes_hold_one_copy_each_unless_the_student_is_sharded(workplace):
    (workplace / "tiny.yaml").write_text(RECIPE)
    command = ("-m", "distill", "run", "tiny.yaml", "student.lora.dropout=0", "--name")
    one, two = (
        run_as_two(*command, name, override, cwd=workplace) for name, override in (("one", ITSELF), ("two", COPY))
    )
    assert "teacher and student hold one copy of" in one and "hold one copy" not in two
    assert_same(*(figures(workplace / "runs" / name) for name in ("one", "two")))
    sharded = run_as_two(*command, "sharded", ITSELF, "parallel={strategy: fsdp, teacher: copied}", cwd=workplace)
    assert "its own copy of a teacher's checkpoint: the student is sharded" in " ".join(sharded.split())


# ------------------------------------------------------------------ an average of adapters


def test_an_average_of_adapters_is_that_of_its_definition(workplace):
    """Held against float64; the weights under the adapters are the student's own and stay as they are."""
    pair = opened("train.precision=bfloat16", AVERAGED)
    teacher = pair.teacher.models["teacher"]
    assert pair.sharing.startswith("teacher and student hold one copy of")
    own, theirs = adapters_of(teacher), adapters_of(pair.student)
    assert len(own) == 28 and own.keys() == theirs.keys()
    assert all(torch.equal(p, theirs[name]) and p is not theirs[name] for name, p in own.items())
    right = {name: p.detach().double() for name, p in own.items()}
    frozen = {name: p.detach().clone() for name, p in teacher.named_parameters() if "lora_" not in name}
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        with torch.no_grad():
            for p in theirs.values():
                p += torch.randn(p.shape, generator=generator)
        pair.teacher.update_ema(pair.student)
        right = {name: 0.7 * value + 0.3 * theirs[name].detach().double() for name, value in right.items()}
    for name, value in right.items():
        torch.testing.assert_close(own[name].double(), value, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(p, frozen[name]) for name, p in teacher.named_parameters() if name in frozen)
    pair.teacher.save(workplace)
    assert load_file(workplace / FILE).keys() == own.keys(), "a checkpoint holds the averaged adapters alone"


@pytest.mark.full
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_average_over_shared_weights_trains_as_one_over_its_own(workplace, precision):
    given = recipe(f"train.precision={precision}", AVERAGED)
    source = source_of(given)
    vocabulary = source.vocabulary()
    rows = vocabulary.read(given.data, 0).train
    context = load_context(given)
    pairs = [open_pair(source, vocabulary, context) for _ in range(2)]
    alone = AveragedTeacher(load_teacher(loaded_section(given), dtype=context.precision.teacher), 0.7)
    alone.add_adapters(given.student.lora, given.train.seed)
    pairs[1] = pairs[1]._replace(teacher=ContextTeacher(alone, pairs[1].teacher.prompt))
    assert [shared_among(dict(pair.models())).numbers > 0 for pair in pairs] == [True, False]
    (losses, weights), (expected, copied) = (trained(pair, rows, workplace / "out") for pair in pairs)
    assert losses == expected and len(set(losses)) == STEPS
    assert all(torch.equal(tensor, copied[name]) for name, tensor in weights.items())
    one, other = (adapters_of(pair.teacher.models["teacher"]) for pair in pairs)
    assert all(torch.equal(p, other[name]) for name, p in one.items())
    assert any(not torch.equal(p, weights[name]) for name, p in one.items())


@pytest.mark.full
def test_a_resumed_run_continues_the_average_of_adapters(workplace):
    settings = ["train.save_every=2", "train.arguments={save_total_limit: 4}", AVERAGED]
    straight = run(recipe(*settings), name="straight").folder
    shutil.copytree(straight, workplace / "runs/again")
    for path in (workplace / "runs/again").glob("*"):
        if path.name in ("result.json", "student", "adapter", "checkpoint-4", "checkpoint-6"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    again = run(recipe(*settings), name="again", resume=True).folder
    assert_same(figures(straight), figures(again))
    averages = [load_file(folder / "checkpoint-6" / FILE) for folder in (straight, again)]
    assert all(torch.equal(tensor, averages[1][name]) for name, tensor in averages[0].items())
    merged = AutoModelForCausalLM.from_pretrained(straight / "student")
    assert not any("lora" in name for name, _ in merged.named_parameters())


def test_a_teacher_with_an_adapter_on_its_head_is_refused():
    """The losses read the head's own weight."""
    model = add_lora(tiny_model(), Lora(head=True))
    with pytest.raises(ValueError, match="teacher: expected a head without adapters"):
        LoadedTeacher(model)


# ------------------------------------------------------------------ adapters of one base model as teachers


@pytest.fixture
def adapters(workplace):
    """Two adapters of the base model, and rows that each is the teacher of."""
    for number, name in enumerate(("math", "code")):
        model = add_lora(AutoModelForCausalLM.from_pretrained("base"), Lora(r=4), seed=number)
        generator = torch.Generator().manual_seed(number)
        for p in adapters_of(model).values():
            p.data = 0.1 * torch.randn(p.shape, generator=generator)
        save_adapter(model, workplace / name)
    rows = [json.loads(line) for line in (workplace / "chat.jsonl").read_text().splitlines()]
    routed = [row | {"domain": ("math", "code")[number % 2]} for number, row in enumerate(rows)]
    (workplace / "chat.jsonl").write_text("\n".join(map(json.dumps, routed)))
    return workplace


def routes(math="base", code="base", **more):
    """Return overrides of a teacher for each of two routes, of the base model in two folders or one."""
    each = [
        {"model": folder, "adapter": name, "merge_adapter": False, "route": name, **more}
        for name, folder in (("math", math), ("code", code))
    ]
    return ["teacher=", f"teachers={json.dumps(each)}", "data.fields={teacher: domain}"]


@pytest.mark.full
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_adapters_of_one_base_hold_it_once(adapters, precision):
    """Held against teachers of three copies of the base: the same outputs, the same run."""
    for name in ("other", "third"):
        shutil.copytree("base", name)
    setting = f"train.precision={precision}"
    one = opened(setting, *routes())
    several = opened(setting, *routes("copy", "other"))
    assert one.sharing.startswith("teachers.0, teachers.1 and student hold one copy of") and several.sharing == ""
    (held, added), (copies, _) = weight_bytes(one), weight_bytes(several)
    assert held - added == (copies - added) / 3
    planned = step_memory(device_plan(recipe(setting, *routes()), Device("a GPU", 80 * 2**30, "hopper", True), 1))
    assert planned.parts["teacher"] + planned.parts["student"] == held
    runs = [
        figures(run(recipe(setting, *overrides), name=name).folder)
        for name, overrides in (("one", routes()), ("several", routes("copy", "other")))
    ]
    assert_same(*runs)


def test_an_adapter_beside_the_weights_is_the_merged_one_up_to_rounding(adapters):
    ids = torch.arange(3, 40)[None]
    section = {"model": "base", "adapter": "math"}
    merged, beside, bare = (
        load_teacher(LocalTeacherConfig(**given))
        for given in (section, section | {"merge_adapter": False}, {"model": "base"})
    )
    with torch.no_grad():
        expected, got, other = (model(ids).logits for model in (merged, beside, bare))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert (expected - other).abs().max() > 1e-2
