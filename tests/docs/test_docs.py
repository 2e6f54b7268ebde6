"""README and docs: short, linked, current, and every command and block of code in them works."""

import ast
import importlib
import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path

import distill_kernels
import doc_blocks
import pytest
import torch
import typer
import yaml
from doc_blocks import PAGES, ROOT, Block

import distill
from distill.cli import app
from distill.commands.settings_schema import settings
from distill.recipe import Recipe, load, parse
from distill.recipe.shipped import find_recipe, shipped_recipes
from distill.recipe.yaml_text import parse_yaml
from scripts import api_pages, docs, readme, settings_pages

COMMANDS = typer.main.get_command(app)
OPTIONAL = {"trl", "vllm", "liger_kernel", "lightning", "wandb", "openai", "lm_eval"}
SHELL = doc_blocks.blocks("sh", "bash", "shell", "console")
YAML = doc_blocks.blocks("yaml", "yml")
JSON = doc_blocks.blocks("json", "jsonl")
PYTHON = doc_blocks.blocks("python", "py")
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
BASE = find_recipe("chat-8b-to-1b")  # what a recipe of the reader's own is taken for


def test_the_readme_is_one_screen_and_a_bit():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    assert len(readme.HEADLINES) <= 12


def test_a_stale_table_is_noticed():
    text = (ROOT / "README.md").read_text()
    assert readme.fill(text.replace("ours", "theirs"), readme.newest_rows()) != text.replace("ours", "theirs")


def test_a_figure_within_a_sentence_is_its_rows():
    settings = '<!-- figure: case=c shape="s, t" candidate=ours column=ms -->'
    row = {"gpu": readme.GPU, "case": "c", "shape": "s, t", "candidate": "ours", "ms": 34.52, "commit": "x"}
    assert readme.fill(f"takes {settings}9.9<!-- end --> ms", [row]) == f"takes {settings}34.5<!-- end --> ms\n"
    for rows in ([], [row, row], [row | {"gpu": "another"}]):
        with pytest.raises(ValueError, match="expected one benchmark row with ms"):
            readme.fill(f"takes {settings}34.5<!-- end --> ms", rows)


def test_every_row_names_the_commit_it_measured():
    nameless = [row for row in readme.all_rows() if row.get("commit") in (None, "", "unknown")]
    assert not nameless


def test_a_headline_compares_with_the_best_rival():
    line = readme.Headline("", ("c", "s"), "ours", ("a", "b"), "ms")
    here = {"gpu": readme.GPU, "case": "c", "shape": "s"}
    rows = [{**here, "candidate": name, "ms": ms} for name, ms in zip("ab", (4.0, 1.0), strict=True)]
    rows += [{**here, "gpu": "another", "candidate": name, "ms": 0.1} for name in ("a", "ours")]
    ours, best, ratio = readme.compared(line, [*rows, {**here, "candidate": "ours", "ms": 2.0}])
    assert (ours["ms"], best["candidate"], ratio) == (2.0, "b", 0.5)
    with pytest.raises(ValueError, match="no benchmark row"):
        readme.compared(line, rows)


def test_every_public_name_has_its_reference_and_its_line_in_the_table():
    public = {*distill_kernels.__all__, *distill.__all__} - {"__version__"}
    listed = [entry.name for entries in api_pages.GROUPS.values() for entry in entries]
    assert set(listed) == public and len(listed) == len(public)
    table = (ROOT / "docs" / "reference" / "kernels.md").read_text()
    references = "".join(page.read_text() for page in (ROOT / "docs" / "reference" / "api").glob("*.md"))
    assert all(f"[`{name}`](api/" in table and re.search(rf"^::: \S+\.{name}$", references, re.M) for name in public)


def test_every_claim_is_shown_by_something_that_is_there():
    """Tests that docs/reference/claims.md names exist, and rows of the cases that it names."""
    lines = (ROOT / "docs/reference/claims.md").read_text().splitlines()
    claims = [line for line in lines if line.startswith("| ") and "---" not in line][1:]
    cases = {row["case"] for path in readme.RESULTS.glob("*.jsonl") for row in map(json.loads, path.open())}
    for claim in claims:
        shown_by = claim.strip("| ").rpartition(" | ")[2]
        for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", shown_by):
            assert not name or f"def {name}(" in (ROOT / file).read_text(), f"{file} has no test {name}"
            assert (ROOT / file).is_file(), claim
        for names in re.findall(r"rows ((?:`[\w ]+`(?:, )?)+)", shown_by):
            for case in re.findall("`([^`]+)`", names):
                assert any(known == case or known.startswith(f"{case} ") for known in cases), f"no rows of {case}"
        assert re.search(r"`tests/|rows `|\]\(|run by CI|read, not run", shown_by), claim
    assert len(claims) > 25


def test_every_reference_of_the_api_pages_names_something_with_a_docstring():
    for page in PAGES:
        for target in re.findall(r"^::: (\S+)$", page.read_text(), re.M):
            module, _, name = target.rpartition(".")
            assert getattr(importlib.import_module(module), name).__doc__, f"{page}: {target}"


def test_every_setting_is_on_the_page_of_its_section():
    pages = settings_pages.pages()
    for setting in settings():
        file = settings_pages.SECTIONS.get(settings_pages.section_of(setting.name), ("index.md",))[0]
        assert re.search(rf"^#+ `?{re.escape(setting.name)}`?$", pages[file], re.M), f"{setting.name}: not in {file}"
    assert settings_pages.section_of("data.on_policy.samples") == "data.on_policy"
    assert settings_pages.section_of("teachers[].model") == "teachers"


def test_a_page_with_another_name_leads_to_the_new_one():
    moved = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["plugins"]["redirects"]["redirect_maps"]
    assert not [page for page in moved if (ROOT / "docs" / page).exists()]
    assert not [page for page in moved.values() if not (ROOT / "docs" / page).is_file()]


def test_the_command_line_reference_is_complete():
    text = (ROOT / "docs" / "reference" / "cli.md").read_text()
    for name, command in docs.commands():
        section = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert all(option in section for parameter in command.params for option in parameter.opts if "--" in option)


def test_every_page_is_in_the_navigation():
    def pages(item: object) -> list[str]:
        if isinstance(item, str):
            return [item]
        return [page for inner in (item if isinstance(item, list) else item.values()) for page in pages(inner)]

    listed = pages(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"])
    assert sorted(listed) == sorted(path.relative_to(ROOT / "docs").as_posix() for path in PAGES[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in doc_blocks.links(page):
        if re.match(r"[a-z]+:", link):
            assert link.startswith(("https://", "mailto:")), link
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: there is no {target}"
        if anchor and target.suffix == ".md":
            assert anchor in doc_blocks.anchors(target), f"{link}: no such heading"


# --------------------------------------------------------------------------------------------------------------- blocks


def recipe_file(name: str) -> Path:
    """The recipe that a command names: one that ships, or a copy of one; else the one to copy."""
    known = {recipe.name: recipe.path for recipe in shipped_recipes()}
    return known.get(Path(name).stem, BASE)


def check_distill(words: list[str]) -> None:
    """Hold that the command line takes these words, and that the recipe with its settings is valid."""
    command = COMMANDS
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    assert not words or words[0].startswith("-") or not hasattr(command, "commands"), f"no such command: {words}"
    context = command.make_context("distill", list(words))
    if context.params.get("recipe") and "overrides" in context.params:
        overrides = list(context.params["overrides"] or ())
        if context.params.get("plugin"):
            overrides.insert(0, f"loss.plugin={{file: x.py, sha256: '{'0' * 64}'}}")
        load(recipe_file(context.params["recipe"]), overrides)


def check_command(words: list[str]) -> None:
    words = doc_blocks.until_redirection(words)
    if words[0] == "distill":
        check_distill(words[1:])
    elif "-m" in words and words[words.index("-m") + 1] == "distill":
        check_distill(words[words.index("-m") + 2 :])
    elif words[0].startswith("python") and "-m" in words:
        assert importlib.util.find_spec(words[words.index("-m") + 1]), words
    elif words[0] in ("torchrun", "accelerate") or words[0].startswith("python"):
        scripts = [word for word in words if word.endswith(".py")]
        assert all((ROOT / script).is_file() for script in scripts if "/" in script), words
    elif words[0] == "pip":
        for extras in re.findall(r"\.\[([\w,]+)\]", " ".join(words)):
            assert set(extras.split(",")) <= EXTRAS, words


@pytest.mark.parametrize("block", [block for block in SHELL if not block.refused], ids=str)
def test_commands_parse_and_their_settings_are_valid(block: Block):
    commands = list(doc_blocks.shell_commands(block.text))
    assert commands
    for words in commands:
        check_command(words)


@pytest.mark.parametrize(
    "line",
    ["distill rum x", "distill run quickstart train.stepz=1", "distill check x --gpuss 2", "python -m scripts.no"],
)
def test_a_wrong_command_is_noticed(line):
    with pytest.raises(Exception):  # noqa: B017
        check_command(line.split())


def overrides_of(tree: object, prefix: str = "") -> list[str]:
    if not isinstance(tree, dict) or not tree:
        return [f"{prefix.rstrip('.')}={json.dumps(tree)}"]
    return [setting for key, value in tree.items() for setting in overrides_of(value, f"{prefix}{key}.")]


@pytest.mark.parametrize("block", YAML, ids=str)
def test_yaml_is_a_recipe_or_a_part_of_one(block: Block):
    if block.excuse is not None:
        list(yaml.safe_load_all(block.text))
        return
    tree = parse_yaml(block.text, str(block))
    assert set(tree) <= set(Recipe.model_fields), f"{block}: say above it why it is no recipe: <!-- not run: ... -->"
    if "extends" in tree or ({"student", "data", "train"} <= set(tree) and {"teacher", "teachers"} & set(tree)):
        parse(block.text)
        return
    if "teachers" in tree:
        tree = {"teacher": None} | tree
    plugin = re.search(r"--plugin", block.page.read_text()) and "terms" in tree.get("loss", {})
    load(BASE, [*([f"loss.plugin={{file: x.py, sha256: '{'0' * 64}'}}"] if plugin else []), *overrides_of(tree)])


@pytest.mark.parametrize("block", JSON, ids=str)
def test_json_blocks_parse(block: Block):
    for line in [block.text] if block.language == "json" else block.text.splitlines():
        json.loads(line)


def given() -> dict[str, object]:
    """The names that blocks of Python may use: two tiny models and a batch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": 96, "num_attention_heads": 2, "num_hidden_layers": 1, "max_position_embeddings": 64}
    student = LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=32, **shape))
    teacher = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, **shape))
    input_ids = torch.randint(96, (2, 12))
    labels = input_ids.clone()
    labels[:, :3] = -100
    return {
        "__name__": "__main__",
        "torch": torch,
        "F": torch.nn.functional,
        "student": student,
        "model": student,
        "teacher": teacher,
        "input_ids": input_ids,
        "labels": labels,
        "x": torch.randn(8, 32),
    }


def check_imports(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in modules:
            if name.split(".")[0] in OPTIONAL and importlib.util.find_spec(name.split(".")[0]) is None:
                continue
            module = importlib.import_module(name)
            for alias in node.names if isinstance(node, ast.ImportFrom) else ():
                assert hasattr(module, alias.name) or importlib.util.find_spec(f"{name}.{alias.name}"), alias.name


@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON}), ids=lambda page: str(page.relative_to(ROOT)))
def test_python_runs_on_tiny_models(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["example.py"])
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}
    (tmp_path / "my-chats.jsonl").write_text(json.dumps(chat) + "\n")
    names = given()
    for block in [block for block in PYTHON if block.page == page]:
        code = compile("\n" * (block.line) + block.text, str(page), "exec")
        check_imports(block)
        if block.excuse is None:
            exec(code, names)
