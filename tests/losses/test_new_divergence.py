"""A divergence is added by a row of a table, a reference and a kernel branch: here to a copy, and run by a recipe."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forked import TEST_FOLDERS
from tiny import save_models

ROOT = Path(__file__).resolve().parents[2]
# the squared Hellinger distance, half the sum of (sqrt p_s - sqrt p_t)^2
ADDED = [  # file, the line before which it is inserted, what
    (
        "__init__.py",
        '    "tvd": Divergence(',
        '    "hellinger": Divergence("half the sum of (sqrt p_s - sqrt p_t)^2"),\n',
    ),
    (
        "divergence.py",
        '    if kind == "tvd":',
        '    if kind == "hellinger":\n'
        "        d = p_s.sqrt() - p_t.sqrt()\n        return d * d / 2, p_s.sqrt() * d / 2\n",
    ),
    (
        "row_functions.py",
        '    TVD = tl.constexpr(CODES.index("tvd"))',
        '    HELLINGER = tl.constexpr(CODES.index("hellinger"))\n',
    ),
    (
        "row_functions.py",
        "    elif KIND == TVD:",
        "    elif KIND == HELLINGER:\n"
        "        d = tl.sqrt(p_s) - tl.sqrt(p_t)\n        f = 0.5 * d * d\n        g = 0.5 * tl.sqrt(p_s) * d\n",
    ),
]
KERNELS = """
import torch
from distill_kernels import FusedDistillationLoss, LossTerm, distillation_loss
from distill_kernels.launch import interpreted
from helpers import realistic_heads, relative_error
terms, operands = [LossTerm("hellinger", 0.7)], realistic_heads(5, 700, 24, 40)
def made(dtype, loss):
    x, w, x_t, w_t = (t.to(dtype).requires_grad_() for t in operands)
    value = loss(x, w, x_t, w_t)
    return [value, *torch.autograd.grad(value, (x, w))]
def dense(x, w, x_t, w_t):
    p, q = (x @ w.T).softmax(-1), (x_t @ w_t.T).softmax(-1)
    return 0.7 * ((p.sqrt() - q.sqrt()) ** 2).sum(-1).mean() / 2
right = made(torch.float64, dense)
ways = FusedDistillationLoss(terms), lambda x, w, x_t, w_t: distillation_loss(x @ w.T, x_t @ w_t.T, terms=terms)
for way in ways:
    results = [made(torch.float64, way)]
    with interpreted():
        results.append(made(torch.float32, way))
    for result, allowed in zip(results, (1e-10, 1e-5)):
        assert all(relative_error(one, other) < allowed for one, other in zip(result, right)), way
print("equal")
"""
RUN = """
from distill.cli import run_command
from distill.doctor import examine
from distill.reports import curves
curves.draw_curves = lambda *args, **kwargs: None
examine.RUN_CHECKS = examine.RUN_CHECKS[:1]  # two processes know no divergence
assert run_command(["run", "recipe.yaml", "output_dir=run"]) == 0
assert run_command(["doctor", "recipe.yaml"]) == 0
"""
RECIPE = """
student: {model: student}
teacher: {model: teacher}
loss: {terms: [{type: hellinger, weight: 0.5}, {type: cross_entropy, weight: 0.1}]}
data: {source: data.jsonl, max_length: 32, cache: false}
train: {steps: 2, tokens_per_step: 64, device: cpu}
generate: {prompts: []}
"""


@pytest.fixture(scope="module")
def call(tmp_path_factory):
    """Runs Python in a folder with models, a recipe and the extended kernels; returns what it prints."""
    folder = tmp_path_factory.mktemp("extended")
    save_models(folder, student={}, teacher={"hidden": 64, "seed": 1})
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"text": "a small model learns " * 8}) for _ in range(9)))
    (folder / "recipe.yaml").write_text(RECIPE)
    package = shutil.copytree(ROOT / "kernels/distill_kernels", folder / "kernels/distill_kernels")
    for name, before, line in ADDED:
        text = (package / "losses" / name).read_text()
        assert text.count(before) == 1
        (package / "losses" / name).write_text(text.replace(before, line + before))
    path = os.pathsep.join(map(str, (folder / "kernels", ROOT, *TEST_FOLDERS)))
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    def run(*arguments, **more):
        command, environ = [sys.executable, *arguments], environment | more
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    run.folder = folder
    return run


@pytest.fixture(scope="module")
def printed(call):
    """Return the output of one process, whose imports take most of its time, that compares, trains and examines."""
    return call("-c", KERNELS + RUN, TRITON_INTERPRET="1")


@pytest.mark.full
def test_references_and_kernels_compute_it(printed):
    assert printed.startswith("equal\n")


@pytest.mark.full
def test_a_recipe_trains_with_it(call, printed):
    steps = [json.loads(line) for line in (call.folder / "run/recipe/metrics.jsonl").read_text().splitlines()]
    assert all(step["divergence"] > 0 for step in steps if "divergence" in step) and "divergence" in steps[0]


@pytest.mark.full
def test_doctor_holds_a_recipe_of_it_to_its_invariants(printed):
    assert "all passed" in printed
