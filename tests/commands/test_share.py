"""`distill generate`, `export`, `inspect` and `bench` as a person meets them, on tiny models."""

import json
from pathlib import Path

import pytest
import torch
from helpers import kernels_launched
from tiny import save_models, save_tiny, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
from two_tokenizers import TOKENIZERS

from distill.cli import run_command
from distill.evaluation.generate import TokenStreamer
from distill.generation.engines import greedy_responses
from distill.planning.inspect_batches import plain_text, rich_text, token_metrics, tokens_of
from distill.reports.export import export

CHATS = [
    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": f"Hi {i}"}]} for i in range(9)
]
RECIPE = (
    "{teacher: {model: teacher}, student: {from_teacher: {layers: 1}}, data: {source: chats.jsonl, max_length: 96, "
    "cache: false}, train: {steps: 2}}"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Models, chats, a recipe, and a finished run of it."""
    monkeypatch.chdir(tmp_path)
    tokenizer = save_models(tmp_path, teacher={"layers": 2, "seed": 1})
    save_tiny(tmp_path / "runs" / "mine" / "student", tiny_model(tokenizer, seed=2), tokenizer)
    (tmp_path / "runs/mine/student/README.md").write_text("# card")
    (tmp_path / "runs/mine/recipe.yaml").write_text(RECIPE)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, CHATS)))
    return tmp_path


# ---------------------------------------------------------------- generate


def test_generate_prints_student_and_teacher(folder, capsys):
    assert run_command(["generate", "mine", "-p", "What?", "--with-teacher", "--max-new-tokens", "6"]) == 0
    out = capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained("teacher")
    for name, path in (("teacher", "teacher"), ("student", "runs/mine/student")):
        model = AutoModelForCausalLM.from_pretrained(path)
        (expected,) = greedy_responses(model, tokenizer, ["What?"], 6)
        said = out.split(f"--- {name}\n")[1].split("\n---")[0]
        assert said.strip() == expected
    assert run_command(["generate", "teacher", "-p", "What?", "-p", "Why?", "--max-new-tokens", "3", "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)
    assert [set(answer) for answer in answers] == [{"prompt", "student"}] * 2


@pytest.mark.full
def test_triton_alone_answers_the_same_tokens(folder, capsys, kernel_device):
    said = {}
    for kernels in ("auto", "triton"):
        command = ["generate", "mine", "-p", "What?", "--teacher", "teacher", "--max-new-tokens", "3", "--json"]
        with kernels_launched() as launched:
            assert run_command([*command, "--kernels", kernels]) == 0
        said[kernels] = json.loads(capsys.readouterr().out)
        assert any("split_k" in name for name in launched) == (kernels == "triton")
    assert said["triton"] == said["auto"] and set(said["auto"][0]) == {"prompt", "student", "teacher"}


def test_triton_alone_is_refused_where_it_cannot_be(folder, capsys, monkeypatch):
    assert run_command(["generate", "mine", "-p", "x", "--kernels", "cuda"]) == 2
    assert "--kernels: expected auto or triton, got 'cuda'" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_command(["generate", "mine", "-p", "x", "--kernels", "triton"]) == 2
    assert "--kernels: triton needs a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "mine", "-p", "What?", "--max-new-tokens", "2"],
        ["export", "mine", "-o", "out"],
        ["eval", "mine", "--json"],
        ["inspect", "mine.yaml", "--rows", "1", "--shade", "entropy"],
    ],
)
def test_a_pipe_gets_no_bars_of_libraries(arguments, folder, capfd):
    logging.enable_progress_bar()
    try:
        assert run_command(arguments) == 0
    finally:
        logging.enable_progress_bar()
    assert "%|" not in capfd.readouterr().err


def test_a_stream_waits_for_whole_characters():
    tokenizer, written = tiny_tokenizer(), []
    stream = TokenStreamer(tokenizer, written.append)
    stream.put(torch.tensor([[1, 2]]))  # the prompt
    ids = tokenizer("né🤖!").input_ids
    for token in ids:
        stream.put(torch.tensor([token]))
    stream.end()
    assert "".join(written) == "né🤖!" and len(ids) > 5
    assert not any("\ufffd" in piece for piece in written)


def test_a_stream_decodes_each_token_a_few_times(monkeypatch):
    tokenizer, written, decoded = tiny_tokenizer(), [], []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **named: decoded.append(len(ids)) or decode(ids, **named))
    stream = TokenStreamer(tokenizer, written.append)
    stream.put(torch.tensor([[1]]))
    ids = tokenizer("two words, " * 40).input_ids
    for token in ids:
        stream.put(torch.tensor([token]))
    stream.end()
    assert "".join(written) == "two words, " * 40 and sum(decoded) < 6 * len(ids)


def test_a_run_without_student_and_a_model_without_teacher(folder, capsys):
    Path("runs/half").mkdir()
    Path("runs/half/recipe.yaml").write_text(RECIPE)
    assert run_command(["generate", "half", "-p", "x"]) == 2
    assert "has no student yet" in capsys.readouterr().err
    assert run_command(["generate", "teacher", "-p", "x", "--with-teacher"]) == 2
    assert "--teacher: required for a model" in capsys.readouterr().err
    assert run_command(["generate", "teacher", "-p", "x", "--beside-teacher"]) == 2
    named, required = capsys.readouterr().err.splitlines()
    assert named == "distill: --beside-teacher: is the former name of --with-teacher, and is read until 1.0"
    assert "--teacher: required for a model" in required


@pytest.mark.parametrize(
    "teacher, message",
    [
        (
            "teachers: [{model: teacher}, {model: other, weight: 2}]",
            "requires one teacher; got teachers",
        ),
        ("teacher: {type: cache, path: gone}", "read its teacher from a cache; name that model"),
    ],
)
def test_a_run_whose_teacher_is_not_one_model_asks_for_its_name(teacher, message, folder, capsys):
    Path("runs/mine/recipe.yaml").write_text("{" + RECIPE[1:].replace("teacher: {model: teacher}", teacher, 1))
    assert run_command(["generate", "mine", "-p", "x", "--with-teacher"]) == 2
    assert message in capsys.readouterr().err
    assert run_command(["generate", "mine", "-p", "x", "--teacher", "teacher", "--max-new-tokens", "2"]) == 0
    assert "--- teacher" in capsys.readouterr().out
    assert run_command(["report", "mine"]) == 0
    found = Path("runs/mine/report.html").read_text()
    assert ("0.33 x teacher + 0.67 x other" in found) is ("teachers" in message)


# ---------------------------------------------------------------- export


def test_an_export_is_complete_and_in_the_requested_dtype(folder, capsys):
    assert run_command(["export", "mine", "-o", "out", "--dtype", "bfloat16", "--shard-size", "40KB", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    names = {path.name for path in Path("out").iterdir()}
    assert names == set(written["files"]) and not Path("out.unfinished").exists()
    assert {"README.md", "recipe.yaml", "config.json", "generation_config.json", "tokenizer.json"} <= names
    assert sum(name.endswith(".safetensors") for name in names) > 1
    model = AutoModelForCausalLM.from_pretrained("out", dtype="auto")
    source = AutoModelForCausalLM.from_pretrained("runs/mine/student")
    assert model.dtype == torch.bfloat16 and written["parameters"] == model.num_parameters()
    for ours, theirs in zip(model.parameters(), source.parameters(), strict=True):
        assert torch.equal(ours, theirs.bfloat16())
    assert AutoTokenizer.from_pretrained("out")("Hi").input_ids


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["mine", "-o", "teacher"], "--output: teacher exists"),
        (["mine", "-o", "out", "--dtype", "int8"], "--dtype: expected one of float32"),
        (
            ["mine", "-o", "out", "--shard-size", "5GiB"],
            "--shard-size: expected a size such as 5GB or 500MB, got '5GiB'",
        ),
        (["gone", "-o", "out"], "no such run"),
    ],
)
def test_export_refuses_invalid_arguments(arguments, message, folder, capsys):
    assert run_command(["export", *arguments]) == 2
    assert message in capsys.readouterr().err and not Path("out").exists()


def test_values_that_float16_cannot_hold_are_refused(folder):
    model = tiny_model(tiny_tokenizer())
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 1e6
    model.save_pretrained("runs/mine/student")
    with pytest.raises(ValueError, match="values that float16 cannot"):
        export(Path("runs/mine"), Path("out"), dtype="float16")
    assert not Path("out").exists()


@pytest.fixture
def hub(monkeypatch):
    """Stands in for the hub's API: records what it was told; `hub.error` is what it answers."""
    import types

    hub = types.SimpleNamespace(calls=[], error=None)

    class Api:
        def create_repo(self, repository, **settings):
            hub.calls.append(("create", repository, settings))
            if hub.error is not None:
                raise hub.error

        def upload_folder(self, *, repo_id, folder_path, **settings):
            hub.calls.append(("upload", repo_id, sorted(path.name for path in Path(folder_path).iterdir())))
            return f"https://hub.example/{repo_id}"

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    return hub


def test_push_makes_a_private_repository_and_uploads_what_was_checked(folder, hub, capsys):
    assert run_command(["export", "mine", "-o", "out", "--push", "me/mine"]) == 0
    assert "pushed to https://hub.example/me/mine" in capsys.readouterr().out
    create, upload = hub.calls
    assert create == ("create", "me/mine", {"private": True, "exist_ok": True})
    assert upload == ("upload", "me/mine", sorted(path.name for path in Path("out").iterdir()))
    hub.calls.clear()
    assert run_command(["export", "mine", "-o", "out2", "--public"]) == 2
    assert "--public: expected together with --push" in capsys.readouterr().err and not Path("out2").exists()
    assert run_command(["export", "mine", "-o", "out2", "--push", "me/mine", "--public", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["address"] == "https://hub.example/me/mine"
    assert hub.calls[0][2]["private"] is False


@pytest.mark.parametrize(
    "repository, error, message",
    [
        ("me/mine", "401 Client Error: Unauthorized", "--push: me/mine: 401 Client Error: Unauthorized (hf auth login"),
        ("me/mine", "offline", "--push: me/mine: the hub cannot be reached"),
        ("me/../x", None, "--push: expected OWNER/NAME, got 'me/../x'"),
        ("mine", None, "--push: expected OWNER/NAME, got 'mine'"),
    ],
)
def test_what_the_hub_refuses_is_one_line_and_the_folder_stays(repository, error, message, folder, hub, capsys):
    import sys

    from huggingface_hub.errors import HfHubHTTPError

    http = sys.modules[HfHubHTTPError.__mro__[1].__module__.split(".")[0]]  # the hub's HTTP library has changed before
    if error == "offline":
        hub.error = http.ConnectError("[Errno -2] Name or service not known")
    elif error:
        request = http.Request("POST", "https://hub.example")
        hub.error = HfHubHTTPError(error, response=http.Response(401, request=request))
    assert run_command(["export", "mine", "-o", "out", "--push", repository]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1, err
    assert Path("out").exists() is (error is not None), "a name that cannot be is found before anything is written"
    if error:
        assert "is written; push it again with" in err


# ---------------------------------------------------------------- inspect


def test_inspect_marks_what_is_only_read(folder, capsys):
    assert run_command(["inspect", "mine.yaml", "--rows", "1"]) == 0
    out = capsys.readouterr().out
    report, _, out = out.partition("\n\n")
    assert "rows read" in report and out.startswith("=== row 1: ") and "--- document 1\n«<|start|>user\nHello" in out
    learned = "".join(part.split("«")[0] for part in out.split("»")[1:])
    assert "Hi " in learned and "Hello" not in learned and "user" not in learned
    assert run_command(["inspect", "mine.yaml", "--rows", "1", "--shade", "divergence", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    for token in row:
        assert (token["value"] is not None) == (token["state"] == "trained")
        assert token["value"] is None or token["value"] > -1e-5
    assert run_command(["inspect", "mine.yaml", "--shade", "loss"]) == 2


def test_tokens_show_documents_and_values():
    row = {"input_ids": [10, 11, 12, 13], "labels": [-100, 11, 12, 13], "position_ids": [0, 1, 0, 1]}
    tokens = tokens_of(row, None, [None, 0.5, None, 1.0])
    assert plain_text(tokens) == "--- document 1\n«10 »11 [0.50]\n--- document 2\n«12 »13 [1.00]"
    drawn = rich_text(tokens)
    assert drawn.plain.count("document") == 2
    assert {str(span.style) for span in drawn.spans} >= {"dim", "white on rgb(255,40,60)"}


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_the_tokens_shown_are_the_text(name):
    """SentencePiece drops the space before a token that stands alone, and bytes alone are no characters."""
    tokenizer, text = TOKENIZERS[name], "the teacher explains: né 🤖🤖 and the student listens"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    row = {"input_ids": ids, "labels": [-100, *ids[1:]], "position_ids": list(range(len(ids)))}
    assert "".join(token.text for token in tokens_of(row, tokenizer)) == tokenizer.decode(ids) == text
    assert [token.id for token in tokens_of(row, tokenizer)] == ids


def test_values_belong_to_the_token_that_is_predicted():
    teacher, student = tiny_model(seed=1), tiny_model(seed=2)
    ids = [5, 6, 7, 8, 9]
    row = {"input_ids": ids, "labels": [-100, 6, 7, -100, 9], "position_ids": list(range(5))}
    (entropy,) = token_metrics([row], "entropy", teacher, student)
    with torch.no_grad():
        p = teacher(input_ids=torch.tensor([ids[:2]])).logits[0, -1].softmax(-1)
    assert entropy[2] == pytest.approx(-(p * p.log()).sum().item(), rel=1e-4)
    assert entropy[0] is None and entropy[3] is None
    (same,) = token_metrics([row], "divergence", teacher, teacher)
    assert same[1] == pytest.approx(0, abs=1e-6)


# ---------------------------------------------------------------- bench, help


def test_bench_needs_a_gpu(folder, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_command(["bench", "mine.yaml"]) == 2
    assert "bench: expected a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "inspect", "bench", "eval", "compare", "report", "generate", "export"])
def test_every_command_shows_examples(command, capsys):
    assert run_command([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"  distill {command} " in out and "--json" in out
