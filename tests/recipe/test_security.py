"""Nobody else's code is run, nothing is written outside of the run's folder, nothing but the hub is called.

Each payload would leave a file called `touched` behind; pickles and models are shown to do so where they are let.
"""

import contextlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import CHAT_TEMPLATE, save_models, save_tiny, tiny_model, tiny_tokenizer

from distill.cli import run_command
from distill.models.loading import load_tokenizer
from distill.recipe import LocalTeacherConfig, RecipeError, load, parse
from distill.training.checkpoints import checkpoint_error

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
teacher: {model: teacher}
student: {from_teacher: {layers: 1}}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.1, max_rows: 2}}
train: {steps: 2, batch_size: 2, log_every: 1, save_every: 1, device: cpu}
generate: {prompts: []}
"""
TEXT = "\n".join(f"The teacher explains line {number} and the student listens to it once more." for number in range(40))
REMOTE = """
from pathlib import Path
Path({touched!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


class Payload:
    """A pickle that touches a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@pytest.fixture
def touched(tmp_path):
    return tmp_path / "touched"


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    save_models(folder, text=TEXT, teacher={"layers": 2, "seed": 1})
    (folder / "r.yaml").write_text(RECIPE)
    return folder


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(capsys, *arguments, says, code=2):
    """The command ends with one line that holds `says`, and no run came of it."""
    assert run_command(["run", "r.yaml", *arguments]) == code
    err = capsys.readouterr().err
    assert err.startswith("distill: ") and err.count("\n") == 1 and says in err, err


# ------------------------------------------------------------------ remote code


@pytest.fixture
def remote(workplace, touched):
    """A teacher that brings Python of its own."""
    edit(
        workplace / "teacher/config.json",
        model_type="own",
        auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    )
    (workplace / "teacher/own.py").write_text(REMOTE.format(touched=str(touched)))
    return workplace


def test_remote_code_is_off_by_default(remote, touched, capsys):
    assert not LocalTeacherConfig(model="x").trust_remote_code
    refused(capsys, says="set trust_remote_code beside teacher.model if you trust it")
    assert not touched.exists() and not Path("runs").exists()


def test_remote_code_runs_with_a_warning_where_the_recipe_allows_it(remote, touched, capsys, caplog, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(remote / "modules"))
    run_command(["run", "r.yaml", "teacher.trust_remote_code=true"])
    assert touched.exists(), capsys.readouterr().err
    assert "teacher.trust_remote_code is on: Python code from teacher will run on this machine" in caplog.text


@pytest.mark.parametrize("side", ["teacher", "student"])
def test_a_tokenizer_brings_no_code_either(workplace, touched, side):
    save_tiny(workplace / "student", tiny_model(), tiny_tokenizer())
    edit(
        workplace / side / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Own", None]}, tokenizer_class="Own"
    )
    (workplace / side / "own.py").write_text(REMOTE.format(touched=str(touched)))
    with contextlib.suppress(ValueError):
        load_tokenizer(LocalTeacherConfig(model=side))
    assert not touched.exists()


@pytest.mark.parametrize("name", ["nobody/kernels", "nobody/kernels@main:attend", "flash|nobody/kernels", "./own"])
def test_attention_is_no_way_to_fetch_code(workplace, name, capsys):
    """transformers takes a name with a slash for a hub repository of compiled code."""
    refused(capsys, f"teacher.attention={name!r}", says="teacher.attention: expected auto or the name of an attention")
    edit(workplace / "teacher/config.json", attn_implementation=name)
    refused(capsys, says="attention implementation that would be fetched as code")


# ------------------------------------------------------------------ pickles


def pickled_weights(folder, touched, name):
    (folder / "model.safetensors").unlink()
    torch.save(Payload(touched), folder / name)
    pickle.loads(pickle.dumps(Payload(touched)))
    assert touched.exists(), "the payload works"
    touched.unlink()


@pytest.mark.plain("pytorch_model.bin-teacher", "model.pt-teacher", "model.pth-student", "consolidated.00.ckpt-student")
@pytest.mark.parametrize("side", ["teacher", "student"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "consolidated.00.ckpt"])
def test_pickled_weights_are_refused(workplace, touched, side, name, capsys):
    save_tiny(workplace / "student", tiny_model(), tiny_tokenizer())
    pickled_weights(workplace / side, touched, name)
    refused(capsys, "student={model: student}", says=f"{side}.model: the weights in {side} are pickles")
    refused(capsys, "student={model: student}", f"{side}.model={side}/{name}", says="is a pickle, which can run code")
    assert not touched.exists() and not Path("runs").exists()


def test_a_pickled_adapter_is_refused(workplace, touched, capsys):
    from peft import LoraConfig, get_peft_model

    get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"])).save_pretrained(workplace / "adapter")
    (workplace / "adapter/adapter_model.safetensors").unlink()
    torch.save(Payload(touched), workplace / "adapter/adapter_model.bin")
    refused(capsys, "teacher.adapter=adapter", says="adapter has no adapter_model.safetensors")
    assert not touched.exists()


STATES = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "scaler.pt", "optimizer.bin")


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A folder with a run called x that has two checkpoints."""
    folder = tmp_path_factory.mktemp("ended") / "work"
    save_models(folder, text=TEXT, teacher={"layers": 2, "seed": 1})
    (folder / "r.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_command(["run", "r.yaml", "--name", "x"]) == 0
    return folder


@pytest.fixture
def stopped(ended, tmp_path, monkeypatch):
    """A copy of that run's folder, to be spoiled."""
    monkeypatch.chdir(shutil.copytree(ended, tmp_path / "work"))
    for manifest in Path("runs/x").glob("checkpoint-*/manifest.json"):
        manifest.unlink()  # as of a checkpoint from before there were any: its sums would tell the fault first
    return Path("runs/x").absolute()


@pytest.mark.parametrize("name", [*STATES, "trainer_state.json", "model.safetensors"])
def test_code_hidden_in_a_checkpoint_is_found(stopped, touched, name):
    file = stopped / "checkpoint-2" / name
    torch.save(Payload(touched), file)
    with file.open("rb") as opened:
        torch.load(opened, weights_only=False)
    assert touched.exists(), "the payload works"
    touched.unlink()
    assert checkpoint_error(stopped / "checkpoint-2").startswith(f"{name} cannot be read") and not touched.exists()


def test_a_checkpoint_that_hides_code_is_passed_over(stopped, touched, capsys):
    for name in STATES:
        torch.save(Payload(touched), stopped / "checkpoint-2" / name)
    assert run_command(["run", "r.yaml", "--name", "x", "--resume", "--unverified"]) == 0
    out = capsys.readouterr().out
    assert "checkpoint-2 cannot be used: optimizer.pt cannot be read as tensors and numbers alone" in out
    assert "continuing from runs/x/checkpoint-1" in out and not touched.exists()


def test_what_nothing_reads_may_hold_anything(stopped, touched):
    for name in ("training_args.bin", "pytorch_model.bin", "other.pkl"):
        torch.save(Payload(touched), stopped / "checkpoint-2" / name)
    assert checkpoint_error(stopped / "checkpoint-2") is None and not touched.exists()


def test_a_sharded_checkpoint_may_hold_tensors_and_numbers_alone(stopped, touched):
    import torch.distributed.checkpoint as shards

    folder = stopped / "checkpoint-2"
    (folder / "model.safetensors").unlink()
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    place = folder / "pytorch_model_fsdp_0"
    shards.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "more": [1, "a", None]},
        checkpoint_id=place,
        no_dist=True,
    )
    assert checkpoint_error(folder) is None
    index = (place / ".metadata").read_bytes()
    (place / ".metadata").write_bytes(pickle.dumps(Payload(touched)))
    assert "it names " in checkpoint_error(folder) and not touched.exists()
    for names in (("torch", "Size", "mro"), ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING", "mro")):
        (place / ".metadata").write_bytes("cbuiltins\ngetattr\n(c{}\n{}\nV{}\ntR.".format(*names).encode())
        assert "it names attribute mro" in checkpoint_error(folder)
    (place / ".metadata").write_bytes(index)
    shards.save({"more": Payload(touched)}, checkpoint_id=place, no_dist=True)
    assert "cannot be read as a checkpoint's index" in checkpoint_error(folder) and not touched.exists()


# ------------------------------------------------------------------ recipes


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:pathlib.Path.touch [[!!python/object/apply:pathlib.Path [{touched}]]]",
        "!!python/name:os.system",
        "!!python/module:os",
        "!!python/object/new:os.system ['touch {touched}']",
    ],
)
def test_tags_in_recipes_overrides_and_locks_are_refused(workplace, touched, tag, capsys):
    tag = tag.format(touched=touched)
    (workplace / "bad.yaml").write_text(RECIPE + f"\nname: {tag}\n")
    with pytest.raises(RecipeError, match="could not determine a constructor"):
        load(workplace / "bad.yaml")
    refused(capsys, f"name={tag}", says="could not determine a constructor")
    (workplace / "lock.yaml").write_text(f"recipe: {tag}\n")
    refused(capsys, "--lock", "lock.yaml", says="could not determine a constructor")
    assert not touched.exists()


@pytest.mark.parametrize(
    "override",
    [
        "student.init=os.system",
        "train.optimizer=os.system",
        "train.schedule=os.system",
        "loss.terms.0.type=os.system",
        "train.arguments={optim: os.system}",
        "train.report_to=[os.system]",
        "data.source=os:system.jsonl",
        "teacher.model='package:os.path/x.gguf'",
        "teacher.model='package:../x/y.gguf'",
        "teacher.model='package:tests/../../x.gguf'",
        "train.arguments={lr_scheduler_type: os.system}",
    ],
)
def test_dotted_paths_mean_nothing(workplace, override, capsys):
    called = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "system", lambda *args: called.append(args))
        assert run_command(["run", "r.yaml", override]) == 2
    assert not called and capsys.readouterr().err.count("\n") == 1 and not Path("runs").exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.system('touch TOUCHED') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append.__self__.__class__.__base__.__subclasses__() }}",
        "{% set x = messages.append({'role': 'assistant', 'content': 'more'}) %}",
    ],
)
def test_templates_run_in_a_sandbox(workplace, touched, template, capsys):
    (workplace / "t.jinja").write_text(template.replace("TOUCHED", str(touched)) + CHAT_TEMPLATE)
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (workplace / "a.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    refused(capsys, "data.source=a.jsonl", "data.chat_template=t.jinja", says="the chat template refuses the row")
    assert not touched.exists()


# ------------------------------------------------------------------ names

HOSTILE = (
    "../../touched",
    "/tmp/touched",
    "..",
    ".",
    "a/b",
    "a\\b",
    "a\nb",
    "-rf",
    "~",
    "$HOME",
    "a;b",
    "\0",
    "x" * 300,
)


def everything(folder):
    return {path.relative_to(folder) for path in folder.rglob("*")}


@pytest.mark.parametrize("name", HOSTILE)
def test_names_of_runs_stay_below_runs(workplace, name, capsys):
    before = everything(workplace.parent)
    assert run_command(["run", "r.yaml", "--name", name]) == 2
    with pytest.raises(RecipeError, match="name: "):
        parse(RECIPE, [f"name={json.dumps(name)}"])
    assert everything(workplace.parent) == before


def test_recipe_files_of_any_name_make_a_plain_folder(workplace):
    for name in ("..yaml", "~.yaml", "a b;$(touch x).yaml", "-é-.yaml", ".hidden.yaml"):
        (workplace / name).write_text(RECIPE)
        made = load(workplace / name).name
        assert made and made.isascii() and made[0].isalnum() and "/" not in made, made


@pytest.mark.parametrize("where", ["tokenizer_config.json", "additional_chat_templates"])
def test_names_of_templates_cannot_lead_out_of_the_student(workplace, touched, where, capsys):
    if where == "additional_chat_templates":
        (workplace / "teacher" / where).mkdir()
        (workplace / "teacher" / where / "..jinja").write_text("x")
    else:
        (workplace / "teacher/chat_template.jinja").unlink()
        templates = {"default": CHAT_TEMPLATE, "../../../../touched": "x"}
        named = [{"name": name, "template": template} for name, template in templates.items()]
        edit(workplace / "teacher" / where, chat_template=named)
    before = everything(workplace.parent)
    code = run_command(["run", "r.yaml"])
    new = {path for path in everything(workplace.parent) - before if path.parts[:2] != ("work", "runs")}
    assert not new, new
    if where == "tokenizer_config.json":
        assert code == 2 and "chat template called '../../../../touched'" in capsys.readouterr().err
        assert not Path("runs").exists()


def test_a_model_card_takes_hostile_names_for_text(workplace):
    hostile = "x](javascript:alert(1)) <script>alert(1)</script> `rm` --- ![a](http:--h)\n# Fake"
    shutil.copy(workplace / "text.txt", workplace / (hostile.replace("\n", " ").replace("/", "_") + ".txt"))
    shutil.copytree(workplace / "teacher", workplace / "<img src=x onerror=alert(1)>")
    before = everything(workplace.parent)
    source = f"data.source={json.dumps(hostile.replace(chr(10), ' ').replace('/', '_') + '.txt')}"
    code = run_command(["run", "r.yaml", source, "teacher.model='<img src=x onerror=alert(1)>'"])
    assert code == 0
    new = {path for path in everything(workplace.parent) - before if path.parts[:3] != ("work", "runs", "r")}
    assert new == {Path("work/runs")}, new
    prose = (workplace / "runs/r/student/README.md").read_text().split("## Recipe")[0]
    assert not re.search(r"(?<!\\)[<>\[\]`!](?=script|img|/|a\]|\(|rm)", prose), prose
    assert "\n# Fake" not in prose and "]\\(javascript" in prose


# ------------------------------------------------------------------ network

WATCHED = """
import json, socket, sys
called = []
def watch(name, original):
    def call(*args, **kwargs):
        called.append([name, repr(args[-1] if name == "connect" else args[0])])
        raise OSError(101, "Network is unreachable")
    return call
socket.getaddrinfo = watch("getaddrinfo", socket.getaddrinfo)
socket.gethostbyname = watch("gethostbyname", socket.gethostbyname)
socket.socket.connect = watch("connect", socket.socket.connect)
socket.socket.connect_ex = watch("connect", socket.socket.connect_ex)
socket.socket.sendto = watch("sendto", socket.socket.sendto)
from distill.cli import run_command
code = run_command(["run", "r.yaml", *sys.argv[1:]])
print("CALLED " + json.dumps([code, called]))
"""


def calls(workplace, *arguments):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    environment |= {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}",
        "HF_HOME": str(workplace / "hf"),
        "OMP_NUM_THREADS": "1",
    }
    (workplace / "watched.py").write_text(WATCHED)
    done = subprocess.run(
        [sys.executable, "watched.py", *arguments], cwd=workplace, env=environment, capture_output=True, text=True
    )
    assert "CALLED " in done.stdout, done.stderr[-2000:]
    return json.loads(done.stdout.split("CALLED ")[1].splitlines()[0])


@pytest.mark.full  # in a process of its own; of data alone, tests/data/test_hostile_inputs.py
def test_a_run_on_local_files_makes_no_network_requests(workplace):
    assert calls(workplace) == [0, []]


@pytest.mark.slow  # the hub's library tries again for a minute
def test_a_hub_model_calls_the_hub_alone(workplace):
    code, called = calls(workplace, "teacher.model=nobody/nothing")
    assert code == 2 and called and all("huggingface.co" in host for _, host in called), called
