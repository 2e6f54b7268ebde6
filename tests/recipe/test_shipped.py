"""Shipped files: recipes validate and run dry, architectures have the published shapes, wheels hold both."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from test_preflight import PUBLISHED

from distill.data.sources import local_path, missing_file, open_source
from distill.recipe import RecipeError, dump, load, parse, shipped
from distill.recipe.shipped import (
    SCHEMA_FILE,
    copy_recipe,
    find_architecture,
    find_recipe,
    shipped_architectures,
    shipped_recipes,
)
from distill.recipe.teachers import describe_teacher

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
DRY_RUN = ["teacher.init=random", "student.init=random", "data.source=synthetic"]


def test_data_that_ship_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = ROOT / "recipes/data/quickstart.jsonl"
    assert local_path("recipes/data/quickstart.jsonl") == shipped
    assert missing_file("recipes/data/quickstart.jsonl", "data.source") is None
    assert open_source("recipes/data/quickstart.jsonl").columns is None
    assert "does not exist" in (missing_file("recipes/data/absent.jsonl", "data.source") or "")
    (tmp_path / "recipes/data").mkdir(parents=True)
    (tmp_path / "recipes/data/quickstart.jsonl").write_text("{}")
    assert local_path("recipes/data/quickstart.jsonl") == Path("recipes/data/quickstart.jsonl"), "one's own comes first"


def test_the_promised_recipes_ship():
    promised = {"quickstart", "llama3-8b-to-1b", "llama3-8b-to-1b-lora", "qwen2.5-7b-to-1.5b", "chat-8b-to-1b"}
    promised |= {"llama3-8b-to-1b-cached", "llama3-8b-to-1b-on-policy", "qwen2.5-7b-to-llama3-1b"}
    assert promised <= {recipe.name for recipe in shipped_recipes()}
    assert all(len(recipe.title) > 20 for recipe in shipped_recipes())


@pytest.mark.plain("chat-8b-to-1b", "quickstart", "two-teachers-by-domain")
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_validates_and_can_run_dry(path):
    recipe = load(path)
    assert recipe.name == path.stem
    assert parse(dump(recipe)) == recipe
    if recipe.student.vocabulary == "cross":  # compares by text, of which random tokens have none
        with pytest.raises(ValueError, match=r"cross: requires text; got data\.source: random tokens"):
            load(path, DRY_RUN)
    fields = [f"teachers.{n}" for n in range(len(recipe.teachers))] or ["teacher"] * (recipe.teacher.type == "model")
    fields += ["teacher"] * recipe.teacher.is_cached
    dry = load(path, [f"{field}.init=random" for field in (*fields, "student")])
    for field, spec in (*describe_teacher(dry).members.items(), ("student", dry.student)):
        assert spec.init == "random" and find_architecture(spec.config, f"{field}.config").is_file()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_headers_give_launch_line_hardware_and_memory(path):
    header = path.read_text().split("\n\nteacher")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    assert "distill run" in header and re.search(r"GiB|GB", header) and re.search(r"CPU|GPU|80 GB", header)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_commands_in_headers_are_valid(path):
    """Every `distill run RECIPE overrides` of a header is a valid recipe, continuation lines included."""
    header = path.read_text().split("\n\nteacher")[0].replace("\\\n#", "")
    commands = re.findall(r"distill run \S+((?: +[a-z_.]+=\S+)*)", header)
    assert commands
    for overrides in commands:
        load(path, overrides.split())


def test_the_docs_list_every_recipe():
    text = (ROOT / "docs" / "reference" / "recipes.md").read_text()
    assert all(f"\n| `{path.stem}` | " in text for path in RECIPES)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_architectures_have_the_published_number_of_parameters(name):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(find_architecture(name).parent)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]


def test_every_architecture_is_checked():
    assert set(shipped_architectures()) == set(PUBLISHED)


def test_recipes_are_found_by_name_and_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = find_recipe("quickstart")
    assert find_recipe("quickstart.yaml") == find_recipe("recipes/quickstart.yaml") == expected
    (tmp_path / "quickstart").write_text("mine")
    assert find_recipe("quickstart") == Path("quickstart"), "a file of the user's comes first"
    with pytest.raises(RecipeError, match="did you mean quickstart"):
        find_recipe("quikstart")
    for missing in ("elsewhere/quickstart.yaml", "\0", "x" * 5000):
        with pytest.raises(RecipeError, match="no such recipe file"):
            find_recipe(missing)


def test_architectures_are_found_by_name_file_and_folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert find_architecture(str(tmp_path)) == find_architecture(str(tmp_path / "config.json"))
    assert find_architecture("llama-3.2-1b") == find_architecture("architectures/llama-3.2-1b")
    with pytest.raises(RecipeError, match=r"student\.config: .*did you mean llama-3\.2-1b"):
        find_architecture("llama3.2-1b", "student.config")
    for missing in ("\0", "x" * 5000, "..", "../architectures/llama-3.2-1b"):
        with pytest.raises(RecipeError):
            find_architecture(missing)


def test_recipes_copy_never_overwrites_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copied = copy_recipe("chat-8b-to-1b")
    shipped_text = (ROOT / "recipes" / "chat-8b-to-1b.yaml").read_text()
    assert copied.read_text().splitlines()[1:] == shipped_text.splitlines()[1:], "the first line is for editors"
    copied.write_text("edited")
    with pytest.raises(RecipeError, match="exists already"):
        copy_recipe("chat-8b-to-1b")
    assert copied.read_text() == "edited"
    assert copy_recipe("chat-8b-to-1b", Path("mine.yaml")).is_file()
    with pytest.raises(RecipeError, match=r"ends in \.yaml"):
        copy_recipe("chat-8b-to-1b", Path("mine.txt"))
    with pytest.raises(RecipeError, match="cannot be written"):
        copy_recipe("chat-8b-to-1b", Path("absent/mine.yaml"))


# ------------------------------------------------------------------------------------------------------------ packaging


def test_the_package_list_names_every_package():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {
        ".".join(path.parent.relative_to(base).parts)
        for base in (ROOT, ROOT / "kernels")
        for top in ("distill", "distill_kernels")
        for path in (base / top).rglob("__init__.py")
    }
    assert listed == found | {"distill_recipes"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy of the sources, so that the checkout stays clean."""
    pytest.importorskip("setuptools", minversion="77")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("distill", "kernels", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", source)
    (source / "README.md").write_text("")
    build = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    result = subprocess.run([sys.executable, "-c", build, str(out)], cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return next(out.glob("*.whl"))


@pytest.mark.full
def test_wheels_carry_recipes_and_architectures(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path)
    shipped = [
        path
        for pattern in ("architectures/*/config.json", "data/*.jsonl", SCHEMA_FILE)
        for path in (ROOT / "recipes").glob(pattern)
    ]
    for path in [*RECIPES, *shipped]:
        assert f"distill_recipes/{path.relative_to(ROOT / 'recipes').as_posix()}" in names
    assert not [name for name in names if name.startswith(("kernels/", "recipes/", "tests/"))]
    assert "distill/recipe/other_tools.yaml" in names, "messages about unknown names read it"
    assert "distill/recipe/tool_arguments.yaml" in names, "distill settings reads it"
    assert {"distill/py.typed", "distill_kernels/py.typed"} <= names, "type checkers read an installed package by it"
    # the installed package finds them, far from any clone
    code = (
        f"import json, sys; sys.path.insert(0, {str(tmp_path)!r}); from distill.recipe.shipped import *;"
        "print(json.dumps([shipped_architectures(), str(shipped_folder())]))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    architectures, folder = json.loads(result.stdout)
    assert architectures == sorted(PUBLISHED) and Path(folder) == tmp_path / "distill_recipes"


def test_a_clone_uses_its_own_recipes():
    assert shipped.shipped_folder() == ROOT / "recipes"
