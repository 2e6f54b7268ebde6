"""The command of docs/how-to/teacher-elsewhere.md: one process serves the recipe's teacher, another trains from it."""

import json
import os
import re
import socket
import subprocess
import sys

import doc_blocks
import pytest
from served import recipe_in, write_models

from distill.recipe import dump
from distill.run import run

PAGE = doc_blocks.ROOT / "docs" / "how-to" / "teacher-elsewhere.md"


@pytest.mark.full
def test_it_trains_as_with_the_teacher_loaded_and_leaves_no_server(tmp_path):
    (command,) = (b.text for b in doc_blocks.blocks("sh") if b.page == PAGE and "distill serve quickstart &" in b.text)
    cut = ["student={from_teacher: {layers: 2}}", "train.steps=3"]
    recipe = recipe_in(write_models(tmp_path), *cut)
    (tmp_path / "quickstart.yaml").write_text(dump(recipe))
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = re.sub(r"\bquickstart\b", str(tmp_path / "quickstart.yaml"), command).replace("8765", str(port))
    command = command.replace(" &", f" --port {port} &").replace(" teacher.type", " --name served teacher.type")
    (tmp_path / "distill").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m distill "$@"\n')
    (tmp_path / "distill").chmod(0o755)
    places = {"PATH": [str(tmp_path), os.environ["PATH"]], "PYTHONPATH": filter(None, sys.path)}
    made = subprocess.run(
        ["bash", "-c", f"{command}wait"], capture_output=True, text=True, timeout=540,
        env={**os.environ, **{name: os.pathsep.join(parts) for name, parts in places.items()}},
    )  # fmt: skip
    path = tmp_path / "runs" / "served" / "result.json"
    assert path.is_file(), made.stdout + made.stderr
    alone = run(recipe, name="alone")
    assert json.loads(path.read_text())["after"]["forward_kl"] == alone.after.forward_kl
    with socket.socket() as gone:
        assert gone.connect_ex(("127.0.0.1", port)) != 0, "the server goes on"
