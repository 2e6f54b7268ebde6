"""`student.lora.save: adapter`: a run whose student is the adapter alone, and everything that reads a student."""

import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file, save_file
from test_run import PLACE, recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill.cli import run_command
from distill.core.manifest import file_checksums
from distill.recipe import parse
from distill.run import run

pytestmark = PLACE

LORA = ("student={model: student, lora: {r: 4, head: true, save: %s}}", "train.learning_rate=2e-2")


def trained(save, *more, **named):
    return run(recipe(LORA[0] % save, LORA[1], *more), name=save, **named).folder


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(3, 40)[None]).logits


def figures(out):
    """Return the values of `eval --json` by name."""
    return {name: interval["value"] for name, interval in json.loads(out)["figures"].items()}


@pytest.mark.full
def test_every_command_takes_an_adapter_as_it_takes_a_merged_student(workplace, capsys, monkeypatch):
    both, alone = trained("both"), trained("adapter")
    names = {path.name for path in (alone / "student").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "README.md"} <= names
    assert not {"config.json", "model.safetensors"} & names and not (alone / "adapter").exists()
    assert (both / "student/config.json").exists() and (both / "adapter/adapter_config.json").exists()
    base = AutoModelForCausalLM.from_pretrained("student")
    expected = logits(AutoModelForCausalLM.from_pretrained(both / "student"))
    assert (logits(base) - expected).abs().max() > 1e-2
    monkeypatch.chdir("/")  # the adapter knows its base from anywhere
    for folder in (alone / "student", both / "adapter"):
        where = workplace / folder
        torch.testing.assert_close(logits(AutoPeftModelForCausalLM.from_pretrained(where)), expected)
    monkeypatch.chdir(workplace)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(base, alone / "student")), expected)

    card = (alone / "student/README.md").read_text()
    assert 'library_name: "peft"' in card and "import AutoPeftModelForCausalLM as" in card
    merged_card = (both / "student/README.md").read_text()
    assert 'library_name: "transformers"' in merged_card and "peft import" not in merged_card

    capsys.readouterr()
    said = {}
    for name in ("both", "adapter"):
        assert run_command(["verify", name]) == 0
        assert "ok       student             as written" in capsys.readouterr().out
        assert run_command(["eval", name, "--before", "student", "--json"]) == 0
        said[name] = [figures(capsys.readouterr().out)]
        assert run_command(["generate", name, "-p", "Hello", "--max-new-tokens", "8", "--json"]) == 0
        said[name].append(json.loads(capsys.readouterr().out))
    assert said["adapter"][0] == pytest.approx(said["both"][0], rel=1e-4) and said["adapter"][1] == said["both"][1]
    assert run_command(["eval", "both", "--before", "runs/adapter/student", "--json"]) == 0
    assert figures(capsys.readouterr().out)["gap_closed"] == pytest.approx(0, abs=1e-4)
    lines = io.StringIO("Hello\n")
    monkeypatch.setattr("sys.stdin", lines)
    assert run_command(["chat", "adapter", "--max-new-tokens", "4"]) == 0
    assert run_command(["compare", "both", "adapter"]) == 0
    assert run_command(["report", "adapter"]) == 0

    assert run_command(["export", "adapter", "-o", "handed"]) == 0
    handed = AutoModelForCausalLM.from_pretrained("handed")
    torch.testing.assert_close(logits(handed), expected)
    assert handed.config.use_cache and AutoTokenizer.from_pretrained("handed")("Hello").input_ids
    assert 'library_name: "transformers"' in Path("handed/README.md").read_text()

    capsys.readouterr()
    tensors = load_file(alone / "student/adapter_model.safetensors")
    name = sorted(tensors)[0]
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, alone / "student/adapter_model.safetensors")
    result = json.loads((alone / "result.json").read_text())
    (alone / "result.json").write_text(json.dumps({name: result[name] for name in result if name != "files"}))
    assert run_command(["verify", "adapter"]) == 1
    assert "result.json: expected files, the checksums of the student's files" in capsys.readouterr().out
    (alone / "result.json").write_text(json.dumps(result | {"files": file_checksums(alone / "student")}))
    assert run_command(["verify", "adapter"]) == 1 and "expected the shape" in capsys.readouterr().out
    assert run_command(["generate", "adapter", "-p", "x"]) == 2
    assert "does not fit its base model" in capsys.readouterr().err
    os.rename("student", "moved")
    assert run_command(["eval", "adapter"]) == 2
    error = capsys.readouterr().err
    assert f"{workplace / 'student'} does not exist" in error and error.count("\n") == 1


@pytest.mark.full
def test_a_run_goes_on_with_either_and_what_it_was_saved_as_may_change(workplace):
    trained("adapter", "train.save_every=2", "train.steps=4", "train.schedule=constant")
    folder = Path("runs/adapter")
    whole = load_file(folder / "student/adapter_model.safetensors")
    shutil.rmtree(folder / "student")
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "checkpoint-4")
    trained("adapter", "train.save_every=2", "train.steps=4", "train.schedule=constant", resume=True)
    again = load_file(folder / "student/adapter_model.safetensors")
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)


@pytest.mark.parametrize(
    "student",
    [
        "{from_teacher: {layers: 2}, lora: {save: adapter}}",
        "{model: a/b, vocabulary: extend, lora: {save: adapter}}",
        "{model: a.gguf, lora: {save: adapter}}",
        "{init: random, config: llama-3.2-1b, lora: {save: adapter}}",
    ],
)
def test_an_adapter_without_a_base_to_name_is_refused(student):
    with pytest.raises(ValueError, match=r"lora\.save: adapter names the model it belongs to") as error:
        parse(f"teacher: {{model: t}}\nstudent: {student}\ndata: {{source: a.txt}}\ntrain: {{steps: 1}}")
    assert "\n" not in str(error.value)
