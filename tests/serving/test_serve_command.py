"""The command of docs/guides/remote-teachers.md: one process serves the recipe's teacher, another trains from it."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys

import doc_blocks
import pytest
import torch
from forked import free_port
from safetensors.torch import load_file
from served import recipe_in, write_models
from two_ranks import ending, gpu_environment

from distill.recipe import dump
from distill.run import run

PAGE = doc_blocks.ROOT / "docs" / "guides" / "remote-teachers.md"


@pytest.mark.full
def test_served_training_equals_local_training_and_leaves_no_server(tmp_path):
    (command,) = (b.text for b in doc_blocks.blocks("sh") if b.page == PAGE and "distill serve quickstart &" in b.text)
    cut = ["student={from_teacher: {layers: 2}}", "train.steps=3"]
    recipe = recipe_in(write_models(tmp_path), *cut)
    (tmp_path / "quickstart.yaml").write_text(dump(recipe))
    port = free_port()
    command = re.sub(r"\bquickstart\b", str(tmp_path / "quickstart.yaml"), command).replace("8765", str(port))
    command = command.replace(" &", f" --port {port} &").replace(" teacher.type", " --name served teacher.type")
    (tmp_path / "distill").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m distill "$@"\n')
    (tmp_path / "distill").chmod(0o755)
    places = {"PATH": [str(tmp_path), os.environ["PATH"]], "PYTHONPATH": filter(None, sys.path)}
    made = subprocess.run(
        ["bash", "-c", f"{command}wait"],
        capture_output=True,
        text=True,
        timeout=540,
        env={**os.environ, **{name: os.pathsep.join(parts) for name, parts in places.items()}},
    )
    path = tmp_path / "runs" / "served" / "result.json"
    assert path.is_file(), made.stdout + made.stderr
    alone = run(recipe, name="alone")
    assert json.loads(path.read_text())["after"]["forward_kl"] == alone.after.forward_kl
    with socket.socket() as gone:
        assert gone.connect_ex(("127.0.0.1", port)) != 0, "the server goes on"


@pytest.mark.gpu
def test_served_from_another_gpu_it_is_the_same_to_the_bit(tmp_path):
    """Server and run are bf16 processes; with one GPU both use it."""
    served_on_a_gpu(tmp_path, ["train.device=cuda", "train.precision=bfloat16", "teacher.dtype=bfloat16"])


def served_on_a_gpu(folder, settings):
    recipe = recipe_in(write_models(folder, layers=3), "train.deterministic=true", *settings)
    (folder / "tiny.yaml").write_text(dump(recipe))
    last = str(max(torch.cuda.device_count() - 1, 0))

    def start(*words, gpu):
        environment = gpu_environment(CUDA_VISIBLE_DEVICES=gpu, PYTHONUNBUFFERED="1")
        return subprocess.Popen(
            [sys.executable, "-m", "distill", *words],
            env=environment,
            cwd=folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    port = str(free_port())
    with contextlib.ExitStack() as stack:

        def until_late(*words, gpu):
            return stack.enter_context(ending(start(*words, gpu=gpu), 120))

        alone = until_late("run", "tiny.yaml", "--name", "alone", gpu="0")
        server = until_late("serve", "tiny.yaml", "--port", port, gpu=last)
        assert next((line for line in server.stdout if line.startswith("serving")), None), "the server has ended"
        at = ["teacher.type=server", f"teacher.url=http://127.0.0.1:{port}"]
        served = until_late("run", "tiny.yaml", "--name", "served", *at, gpu="0")
        for each in (alone, served):
            written, _ = each.communicate()
            assert each.returncode == 0, written[-4000:]
    weights = [load_file(folder / "runs" / name / "student" / "model.safetensors") for name in ("alone", "served")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    results = [
        json.loads((folder / "runs" / name / "result.json").read_text())["after"] for name in ("alone", "served")
    ]
    assert results[0] == results[1]
