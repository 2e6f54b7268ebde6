"""Inputs that are refused, as data: recipes, rows and commands in the YAML files here, and what the error says of each.

A file maps the title of a group to what its inputs share and its `cases`, each with what is its own:

- `recipe`: the text of a recipe; `add`: lines that follow it; `set`: overrides. `parse` refuses it with one error.
- `data`: settings of a recipe's section `data` in place of a recipe. Reading the data is refused; `template` is the
  tokenizer's chat template.
- `command`: arguments of `distill` in a folder with the recipe as `r.yaml`. It ends with exit code 2, one line on
  standard error, and no run. `models` are models of `tests/tiny.py` by their names.
- `files`: texts by their names in the working folder, or mappings of `text` or `hex`, with `encoding`, `times`, `gzip`.
- `says`: text, or several, of the error, which is one line.
"""

import gzip
from pathlib import Path

import pytest
import yaml
from tiny import tiny_tokenizer

from distill.cli import run_command
from distill.data.load import load_data
from distill.recipe import Data, RecipeError, parse

FOLDER = Path(__file__).parent
KEYS = {"recipe", "add", "set", "data", "command", "models", "files", "says", "template"}


def read_cases():
    for path in sorted(FOLDER.glob("*.yaml")):
        for title, group in yaml.safe_load(path.read_text(encoding="utf-8")).items():
            for case in group["cases"]:
                shared = {name: value for name, value in group.items() if name != "cases"}
                whole = shared | case
                whole["files"] = shared.get("files", {}) | case.get("files", {})
                if "data" in whole:
                    whole["data"] = shared.get("data", {}) | case.get("data", {})
                assert whole.keys() <= KEYS, (path.name, title, whole.keys() - KEYS)
                yield pytest.param(whole, id=f"{path.stem}: {title}: {texts_of(whole['says'])[0]}"[:110])


def texts_of(value):
    return [value] if isinstance(value, str) else list(value)


def content_of(file):
    if isinstance(file, str):
        return file.encode()
    content = bytes.fromhex(file["hex"]) if "hex" in file else file["text"].encode(file.get("encoding", "utf-8"))
    content *= file.get("times", 1)
    return gzip.compress(content, mtime=0) if file.get("gzip") else content


def refuse_recipe(case, read_output):
    with pytest.raises(RecipeError) as error:
        parse(case.get("recipe", "") + case.get("add", ""), texts_of(case.get("set", [])))
    (line,) = error.value.faults
    return line


def refuse_data(case, read_output):
    data = Data(**{"max_length": 64, "cache": False} | case["data"])
    tokenizer = tiny_tokenizer(**({"chat_template": case["template"]} if "template" in case else {}))
    with pytest.raises(ValueError) as error:
        load_data(data, tokenizer, seed=0)
    return str(error.value)


def refuse_command(case, read_output):
    assert run_command([*texts_of(case["command"]), *texts_of(case.get("set", []))]) == 2
    assert not Path("runs").exists()
    output, error = read_output()
    assert "models" in case or not output
    assert error.startswith("distill: ") and error.endswith("\n")
    return error[:-1]


@pytest.mark.parametrize("case", read_cases())
def test_it_is_refused_in_one_line_that_says(case, tmp_path, monkeypatch, capsys, placed):
    monkeypatch.chdir(tmp_path)
    for name, file in case["files"].items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content_of(file))
    refuse = refuse_recipe
    if "data" in case:
        refuse = refuse_data
    if "command" in case:
        refuse = refuse_command
        Path("r.yaml").write_text(case.get("recipe", "") + case.get("add", ""))
        made = placed(**case.get("models", {}))
        for name in case.get("models", {}):
            Path(name).symlink_to(made / name)
    line = refuse(case, capsys.readouterr)
    assert "\n" not in line
    for text in texts_of(case["says"]):
        assert text in line
