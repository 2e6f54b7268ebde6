"""Checks of one family: tiny random models of it, held to plain transformers with every document alone.

packed      KL of rows of several documents; or that such rows are refused, and for a reason
padded      KL of rows of one document each, padded to one length
gradients   of every parameter, under the fused loss on those rows, against full logits
cut         a run of four steps whose student has two of its teacher's layers
resume      that run, taken up in its middle, ends with the same bits
reload      its student, loaded by transformers, gives the logits of its weights again, finite ones
export      `distill export` reads it back
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from distill.data.collator import Collator
from distill.models.patch.packed import packing_problem
from distill.models.patch.patching import patch
from distill.teachers.objective import DistillationObjective
from scripts.families.configs import LAYERS, tiny_config

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from tiny import save_tiny, tiny_tokenizer

MOST_KL, MOST_GRADIENT_ERROR = 1e-4, 1e-4  # nats a token; relative
APART = 1e-3  # of logits: documents of a row whose logits differ by more see each other
LENGTHS = (61, 40, 51)  # beyond every window, chunk and selection of the tiny configurations
RECIPE = """
teacher: {model: teacher}
student: %s
data: {source: text.txt, max_length: 64, cache: false, packing: %s, validation: {fraction: 0.1, max_rows: 2}}
train: {steps: 4, batch_size: 2, learning_rate: 3e-3, warmup: 0, log_every: 1, save_every: 2, device: cpu}
generate: {prompts: []}
output_dir: runs
"""
TEXT = "\n".join(f"The teacher explains line {number} and the student listens to it once more." for number in range(60))


@dataclass
class Family:
    """Models and data that the checks of a family share.

    Attributes:
        folder: Empty at first; the models and the run are saved there.
        problem: What `packing_problem` finds, or None.
    """

    name: str
    folder: Path
    problem: str | None = None
    found: dict[str, Any] = field(default_factory=dict)

    def model(self, seed: int = 0) -> Any:
        """Return a random model; see `random_model`."""
        return random_model(self.name, seed)

    def documents(self) -> list[torch.Tensor]:
        """Return documents of `LENGTHS`."""
        generator = torch.Generator().manual_seed(3)
        return [torch.randint(3, 259, (length,), generator=generator) for length in LENGTHS]

    def batch(self, *, packed: bool) -> dict[str, torch.Tensor]:
        """Return all documents in one row, or in a row each."""
        documents = [document.tolist() for document in self.documents()]
        positions = [list(range(len(document))) for document in documents]
        rows = [{"input_ids": d, "labels": d, "position_ids": p} for d, p in zip(documents, positions, strict=True)]
        if packed:
            rows = [{key: [*itertools.chain(*(row[key] for row in rows))] for key in rows[0]}]
        return Collator(2, omit_plain_positions=True)(rows)

    def apart(self, rows: torch.Tensor, *, packed: bool) -> list[torch.Tensor]:
        """Return what belongs to each document of a batch's outputs [B, S, ...]."""
        return list(rows[0].split(LENGTHS)) if packed else [rows[n, :length] for n, length in enumerate(LENGTHS)]


def random_model(name: str, seed: int = 0, scale: int = 1) -> Any:
    """Return a model of a family in eval mode whose weights hide nothing: none is still 0 or 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(name, scale), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape)
    return model.eval()


def logits(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return [B, S, V]."""
    inputs = {key: batch[key] for key in ("input_ids", "position_ids") if key in batch}
    found: torch.Tensor = model(**inputs, use_cache=False).logits
    return found


def alone(model: Any, family: Family) -> list[torch.Tensor]:
    """Return the logits [T, V] of each document alone, by plain transformers."""
    return [model(input_ids=document[None], use_cache=False).logits[0] for document in family.documents()]


def kl(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> float:
    """Return the mean KL(expected || actual) in nats a token."""
    log_p, log_q = (F.log_softmax(torch.cat(rows).double(), -1) for rows in (expected, actual))
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


@torch.no_grad()
def divergences(family: Family) -> None:
    """Check packed and padded rows of a patched model; see above."""
    model = family.model()
    expected = alone(model, family)
    family.problem = packing_problem(model)
    packed = family.apart(logits(model, family.batch(packed=True)), packed=True)
    leak = max(float((a - b).abs().max()) for a, b in zip(packed, expected, strict=True))
    family.found["leak"] = leak
    if (family.problem is None) != (leak <= APART):
        raise AssertionError(f"packed rows: {family.problem or 'accepted'}, but logits differ by {leak:.1e}")
    report = patch(model, "teacher", log_it=False)
    family.found["patched"] = dict(report.swapped) | ({"attention": 1} if report.attention else {})
    family.found["left"] = report.left
    for name, is_packed in (("packed", True), ("padded", False)):
        if is_packed and family.problem is not None:
            if report.attention is None or packing_problem(model) is not None:
                family.found[name] = "refused"
                continue
            family.found["packed_by"] = "our attention"
        actual = family.apart(logits(model, family.batch(packed=is_packed)), packed=is_packed)
        family.found[name] = figure = kl(expected, actual)
        if not figure <= MOST_KL:
            raise AssertionError(f"{name}: KL {figure:.1e} against documents alone")


def gradients(family: Family) -> None:
    """Check the fused loss of patched models against full logits; see above."""
    student, teacher = family.model(1), family.model()
    plain = copy.deepcopy(student)
    with torch.no_grad():
        targets = [F.log_softmax(rows[:-1], -1) for rows in alone(teacher, family)]
    scores = [F.log_softmax(rows[:-1], -1) for rows in alone(plain, family)]
    rows = [(t.exp() * (t - s)).sum(-1) for t, s in zip(targets, scores, strict=True)]
    torch.cat(rows).mean().backward()
    patch(teacher, "teacher", log_it=False)
    patch(student, "student", log_it=False)
    terms = {"temperature": 1.0, "terms": [{"type": "forward_kl", "weight": 1.0}]}
    objective = DistillationObjective(teacher, student, terms)
    packed = isinstance(family.found.get("packed"), float)
    student(**objective.student_inputs(family.batch(packed=packed)))["loss"].backward()
    ours = {name: p.grad for name, p in student.named_parameters()}
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    largest = max(gradient.norm() for gradient in wanted.values())
    worst = 0.0
    for name, gradient in wanted.items():
        own = ours[name]
        assert own is not None, f"gradients: {name} has none"
        worst = max(worst, float((own - gradient).norm() / gradient.norm().clamp_min(1e-3 * largest)))
    family.found["gradients"] = worst
    if not worst <= MOST_GRADIENT_ERROR:
        raise AssertionError(f"gradients: off by {worst:.1e}")


def run_of_four_steps(family: Family) -> None:
    """Check a run of a student with two of its teacher's layers (another model, where that is refused), and resume."""
    from distill.recipe import parse
    from distill.run import run

    tokenizer = tiny_tokenizer()
    for number, name in enumerate(("teacher", "student")):
        save_tiny(family.folder / name, family.model(number), tokenizer)
    (family.folder / "text.txt").write_text(TEXT)
    packing = "true" if family.problem is None else "false"
    cut = RECIPE % (f"{{from_teacher: {{layers: {LAYERS // 2}}}}}", packing)
    with contextlib.chdir(family.folder):
        try:
            run(parse(cut), name="run")
            family.found["cut"], recipe = "yes", parse(cut)
        except ValueError as error:
            family.found["cut"] = f"refused: {str(error).splitlines()[0][:160]}"
            recipe = parse(RECIPE % ("{model: student}", packing))
            run(recipe, name="run")
        folder = Path("runs/run")
        whole = weights(folder / "student")
        shutil.rmtree(folder / "checkpoint-4")
        shutil.rmtree(folder / "student")
        (folder / "result.json").unlink()
        run(recipe, name="run", resume=True)
        again = weights(folder / "student")
        same = whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)
        if not same:
            raise AssertionError("resume: the weights are other ones")
        family.found["resume"] = "to the bit"


def reload_and_export(family: Family) -> None:
    """Check that the student is a folder that transformers and `distill export` read."""
    from distill.reports.export import export

    student = family.folder / "runs/run/student"
    model, report = AutoModelForCausalLM.from_pretrained(student, output_loading_info=True)
    strange = [*report["unexpected_keys"], *report["mismatched_keys"]]
    if strange or not logits(model.eval(), family.batch(packed=False)).isfinite().all():
        raise AssertionError(f"reload: {strange[:3] or 'logits are not finite'}")
    family.found["reload"] = "yes"
    written = export(family.folder / "runs/run", family.folder / "export")
    assert written["parameters"] == sum(p.numel() for p in model.parameters())
    family.found["export"] = "yes"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a saved model."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


CHECKS: tuple[Callable[[Family], None], ...] = (divergences, gradients, run_of_four_steps, reload_and_export)


def examine(name: str, folder: Path) -> dict[str, Any]:
    """Return what the checks found, with a list of failures under `failed`."""
    family = Family(name, folder)
    failures: list[str] = []
    for check in CHECKS:
        if check is reload_and_export and "resume" not in family.found:
            break
        try:
            with _quiet():
                check(family)
        except Exception as error:  # of a hundred models: each becomes a row, whatever happens to it
            line = (str(error).splitlines() or [""])[0][:200]
            failures.append(f"{check.__name__}: {type(error).__name__}: {line}".removesuffix(": "))
    return family.found | {"failed": failures}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
