"""Images and job files: what they copy exists, their commands are ours, and their schemas hold where these are had."""

import ast
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer
import yaml

from distill.cli import app

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "scripts/examples/jobs"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMMANDS = typer.main.get_command(app)


def stages() -> dict[str, str]:
    """Return the Dockerfile's stages by name, each from its FROM to the next."""
    found = re.split(r"^FROM ", DOCKERFILE, flags=re.M)[1:]
    return {text.splitlines()[0].partition(" AS ")[2]: text for text in found}


def test_every_stage_is_made_of_an_earlier_one():
    known: list[str] = []
    for name, text in stages().items():
        parent = text.split()[0]
        assert parent in known or parent.startswith("python:"), parent
        known.append(name)
    assert {"cpu", "cuda", "dev"} <= set(known)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_has_all_that_the_package_is_made_of(target):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = {word for line in re.findall(r"^COPY (.+)", stages()[target], re.M) for word in line.split()[:-1]}
    needed = {path.split("/")[0] for path in project["tool"]["setuptools"]["package-dir"].values()}
    needed |= {project["project"]["readme"], "pyproject.toml", "LICENSE"}
    assert needed == copied
    admitted = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied | {"constraints.txt"} == admitted and all((ROOT / name).exists() for name in admitted)
    extras = re.findall(r"\.\[([\w,]+)\]", stages()[target])
    assert set(extras[0].split(",")) <= set(project["project"]["optional-dependencies"])


def test_the_development_container_is_a_stage_of_the_dockerfile():
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    build = container["build"]
    assert (ROOT / ".devcontainer" / build["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert build["target"] in stages()
    assert f"--create-home --uid 1000 {container['remoteUser']}" in DOCKERFILE


def commands() -> list[list[str]]:
    """Return the arguments of every `distill` that the job files start."""
    sky = yaml.safe_load((JOBS / "skypilot.yaml").read_text())
    found = [shlex.split(line)[1:] for line in sky["run"].splitlines()]
    *_, job = yaml.safe_load_all((JOBS / "kubernetes.yaml").read_text())
    found.append(job["spec"]["template"]["spec"]["containers"][0]["args"])
    lists = [node for node in ast.walk(ast.parse((JOBS / "modal_job.py").read_text())) if isinstance(node, ast.List)]
    words = [[ast.literal_eval(each) if isinstance(each, ast.Constant) else "x" for each in one.elts] for one in lists]
    return [*found, *(line[1:] for line in words if line and line[0] == "distill")]


def test_job_files_start_commands_that_there_are():
    assert len(commands()) == 4
    for name, *words in commands():
        COMMANDS.commands[name].make_context(name, list(words))
        assert name == "check" or "--resume-if-any" in words


def test_kubernetes_mounts_volumes_that_it_has():
    claim, job = yaml.safe_load_all((JOBS / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    volumes = [volume["persistentVolumeClaim"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    assert [volume["claimName"] for volume in volumes] == [claim["metadata"]["name"]]


def test_kubernetes_accepts_the_job():
    validate = pytest.importorskip("kubernetes_validate").validate
    for document in yaml.safe_load_all((JOBS / "kubernetes.yaml").read_text()):
        validate(document, "1.33", strict=True)


def test_skypilot_accepts_the_task():
    schemas = pytest.importorskip("sky.utils.schemas")
    validator = pytest.importorskip("jsonschema").Draft202012Validator(schemas.get_task_schema())
    validator.validate(yaml.safe_load((JOBS / "skypilot.yaml").read_text()))
