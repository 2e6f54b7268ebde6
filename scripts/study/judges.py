"""Judges of students: each measures one before and after training, and says what its row holds of that.

held_out      figures against the loaded teacher over the whole vocabulary, on held-out rows, with 95 % intervals
own_teacher   KL to the teacher that the run learned from, on held-out rows
run_figures   what the run itself measures, its tasks included: what `distill compare --reference` compares with
own_answers   the same on the student's own answers to the held-out prompts, sampled at T = 1, and the final numbers
              of its greedy answers (GSM8K)
answers       exact answers to held-out questions (tasks.py)
sums_right    right sums of the prompts that were learned, and of others (sums.py)
size          the student's parameters and shape
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from distill.data.chat import template_of
from distill.data.collator import Collator
from distill.evaluation.bootstrap import reduction_interval
from distill.evaluation.evaluate import HeldOut
from distill.evaluation.evaluate_documents import EvaluationResult, evaluate_documents
from distill.generation.decode_loop import DecodeEngine
from distill.generation.documents import RolloutDocument, as_row, documents_of
from distill.generation.engines import engine_for, settings_for
from distill.generation.sampling import Sampling
from distill.recipe import Recipe
from distill.reports.run_manifest import Measured
from distill.run import Opened, Prepared
from scripts.study import sums
from scripts.study.planner import Run
from scripts.study.tasks import TASKS

if TYPE_CHECKING:
    from scripts.study.runner import Lab

CURVE = ("forward_kl", "reverse_kl", "agreement", "student_cross_entropy")  # of each point of a curve
LONGEST = 256  # tokens of an answer that is judged
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Subject:
    """A student that is judged.

    Attributes:
        run: Run that it is of.
        recipe: Its whole recipe.
        prepared, started: Phases of the run.
        lab: What all runs share.
    """

    run: Run
    recipe: Recipe
    prepared: Prepared
    started: Opened
    lab: Lab

    @property
    def student(self) -> Any:
        """The model as it stands."""
        return self.started.trainer.model

    @property
    def tokenizer(self) -> Any:
        """The student's tokenizer."""
        return self.prepared.vocabulary.tokenizer

    @property
    def rows(self) -> Any:
        """Held-out rows; they are shuffled, so that the first ones are a sample."""
        rows = self.prepared.splits.validation
        return rows.select(range(min(self.lab.plan.fields.get("held_out_rows", len(rows)), len(rows))))

    def engine(self, model: Any, *, chat: bool = True) -> DecodeEngine:
        """Return the generation engine for a model."""
        template = template_of(self.recipe.data, self.tokenizer) if chat else None
        autocast = self.prepared.context.precision.autocast
        longest = self.recipe.data.max_length
        settings = settings_for(model, self.tokenizer, template, autocast=autocast, max_length=longest)
        return engine_for("distill", model, settings)


# ---------------------------------------------------------------- against teachers


def held_out(subject: Subject, rows: Any = None) -> EvaluationResult:
    """Return figures of a student against the teacher that judges, on held-out rows or on others."""
    return evaluate_documents(
        subject.student,
        subject.lab.teacher(subject.run),
        subject.rows if rows is None else rows,
        batch_size=subject.recipe.train.batch_size,
        autocast=subject.prepared.context.precision.autocast,
    )


def point(found: EvaluationResult) -> dict[str, float]:
    """Return a place on a curve."""
    return {name: found.figures[name].value for name in CURVE}


def _held_out_row(subject: Subject, before: EvaluationResult, after: EvaluationResult) -> dict[str, Any]:
    row: dict[str, Any] = {"held_out_tokens": after.tokens, "held_out_rows": after.rows}
    row["before"] = {name: figure.value for name, figure in before.figures.items()}
    row["after"] = {name: list(figure) for name, figure in after.figures.items()}
    row["calibration_error"] = after.calibration_error
    if before is not after:
        row["gap_closed"] = list(after.kl_reduction(before))
    controls = subject.lab.plan.fields.get("paired_with_best_of")
    if controls:
        row |= _paired(subject, after, controls)
    return row


def _paired(subject: Subject, after: EvaluationResult, controls: Sequence[str]) -> dict[str, Any]:
    """Return a trained arm's KL relative to that of the best control, paired by document."""

    def file_of(arm: str) -> Path:
        names = "-".join(str(level) for level in (subject.run.names | {"arm": arm}).values())
        return subject.lab.work / "documents" / f"{names}.npz"

    own = file_of(subject.run.names["arm"])
    own.parent.mkdir(exist_ok=True)
    np.savez(own, sums=after.sums, counts=after.counts)
    if subject.run.names["arm"] in controls:
        return {}
    missing = [arm for arm in controls if not file_of(arm).is_file()]
    if missing:
        raise ValueError(
            f"--work: expected the controls' figures in it, got none of {', '.join(missing)}; make them first"
        )
    sums_of = [np.load(file_of(arm))["sums"] for arm in controls]
    best = min(sums_of, key=lambda sums: float(sums[:, 0].sum()))
    closed = reduction_interval(best[:, 0], after.sums[:, 0])
    return {"of_best_control": [1 - closed.value, 1 - closed.high, 1 - closed.low]}


def _own_teacher(subject: Subject) -> HeldOut:
    return subject.started.results.measure().held_out


def _own_teacher_row(subject: Subject, before: HeldOut, after: HeldOut) -> dict[str, Any]:
    if before is after:  # not trained: its answers are judged alone
        return {}
    kl = {"kl": [before.forward_kl, after.forward_kl], "reverse_kl": [before.reverse_kl, after.reverse_kl]}
    return kl | {"held_out_tokens": after.tokens}


def _run_figures_row(subject: Subject, before: Measured, after: Measured) -> dict[str, Any]:
    row: dict[str, Any] = {"held_out_tokens": after.held_out.tokens}
    for when, found in (("before", before), ("after", after)):
        row[when] = {name: value for name, value in found.held_out._asdict().items() if name != "tokens"}
    if after.tasks:
        row["accuracy"] = {
            name: {"before": before.tasks[name].value, "after": found.value} for name, found in after.tasks.items()
        }
    return row


# ---------------------------------------------------------------- by the student's own answers


class Answers(NamedTuple):
    """A model's responses to held-out prompts: documents with them, and the share cut off."""

    documents: list[RolloutDocument]
    truncated: float


def answer(subject: Subject, model: Any, documents: Sequence[RolloutDocument], *, drawn: bool) -> Answers:
    """Return answers to the documents' prompts, drawn at T = 1 or greedy; the same prompt draws by one seed."""
    prompts = [document.prompt for document in documents]
    made = subject.engine(model).generate(
        prompts,
        max_new_tokens=[min(LONGEST, subject.recipe.data.max_length - len(prompt)) for prompt in prompts],
        sampling=Sampling(float(drawn)),
        seeds=list(range(len(prompts))),
    )
    told = zip(documents, prompts, made.tokens, strict=True)
    answered = [document.with_response(prompt, tokens) for document, prompt, tokens in told]
    return Answers(answered, sum(made.truncated) / max(len(prompts), 1))


def _own_answers(subject: Subject) -> dict[str, Any]:
    rows = subject.rows
    documents = documents_of(Collator(0)([rows[number] for number in range(len(rows))]))
    said = answer(subject, subject.student, documents, drawn=True)
    found = held_out(subject, [as_row([document]) for document in said.documents])
    figures: dict[str, Any] = {name: list(figure) for name, figure in found.figures.items()}
    figures |= {"answers": len(documents), "length": found.tokens / len(documents), "truncated": said.truncated}
    kept = subject.lab.kept
    if "teacher_right" not in kept:
        kept["teacher_right"] = solved(subject, subject.lab.teacher(subject.run), documents)
    right = solved(subject, subject.student, documents)
    return {"own": figures, "right": right, "teacher_right": kept["teacher_right"]}


def solved(subject: Subject, model: Any, documents: Sequence[RolloutDocument]) -> list[int]:
    """Return the number of problems that the greedy response solves, and the number of problems."""
    said = answer(subject, model, documents, drawn=False).documents
    pairs = [
        [final_number(_text(subject, one.ids[len(one.prompt) :])) for one in (document, other)]
        for document, other in zip(documents, said, strict=True)
    ]
    return [sum(true == given and true is not None for true, given in pairs), len(pairs)]


def _text(subject: Subject, ids: Sequence[int]) -> str:
    return str(subject.tokenizer.decode(list(ids), skip_special_tokens=True))


def final_number(text: str) -> float | None:
    """The number after the last `####`, which closes an answer of GSM8K, else the last number of all."""
    _, mark, rest = text.rpartition("####")
    numbers = NUMBER.findall(rest)
    if not numbers:
        return None
    return float(numbers[0 if mark else -1].replace(",", ""))


# ---------------------------------------------------------------- by exact answers


def read(path: Path | str) -> list[dict[str, str]]:
    """Rows of a jsonl file."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def greedy(model: Any, tokenizer: Any, prompts: Sequence[str], most: int) -> list[str]:
    """Return the greedy answer to each text, of at most so many tokens."""
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in prompts]
    settings = settings_for(model, tokenizer, None, max_length=max(map(len, ids)) + most)
    made = engine_for("distill", model, settings).generate(ids, max_new_tokens=most, batch_size=128)
    return tokenizer.batch_decode(made.tokens, skip_special_tokens=True)  # type: ignore[no-any-return]


def _prompts(subject: Subject, rows: Sequence[dict[str, str]]) -> list[str]:
    """Return the rows' questions, of the informed teacher after what it reads."""
    column = subject.run.options.get("reads")
    return [(f"{row[column]}\n\n" if column else "") + row["prompt"] for row in rows]


def _exact(subject: Subject) -> dict[str, Any]:
    """Return 1 or 0 for each question of a domain, in the order of the rows."""
    rows = read(str(subject.recipe.data.validation.source))
    longest = max(TASKS[row["domain"]].longest for row in rows)
    said = greedy(subject.student, subject.tokenizer, _prompts(subject, rows), longest)
    right: dict[str, str] = {}
    for text, row in zip(said, rows, strict=True):
        domain = row["domain"]
        right[domain] = right.get(domain, "") + str(int(TASKS[domain].is_right(text, row["right"])))
    return {"right": right, "answers": said[:6]}


def _sums_right(subject: Subject) -> dict[str, Any]:
    data = subject.recipe.data
    found = {}
    for name, source in (("learned", data.source), ("held out", data.validation.source)):
        rows = read(str(source))
        said = greedy(subject.student, subject.tokenizer, _prompts(subject, rows), sums.LONGEST)
        found[name] = "".join(str(int(sums.right("", text, row))) for text, row in zip(said, rows, strict=True))
    return {"right": found}


def _size(subject: Subject) -> dict[str, Any]:
    cut = subject.recipe.student.from_teacher
    row: dict[str, Any] = {"parameters": sum(p.numel() for p in subject.student.parameters())}
    shape = subject.lab.plan.levels("shape")[subject.run.names["shape"]]["settings"]
    cut = cut or subject.lab.recipe_with([*subject.lab.more, *shape]).student.from_teacher
    assert cut is not None
    return row | {"cut": cut.model_dump(exclude_none=True, exclude={"importance"})}


class Judge(NamedTuple):
    """A way to judge a student.

    Attributes:
        measure: Measures it as it stands.
        row: Fields of its row from what was measured before and after training; the same twice where it is not trained.
        before: Whether it is measured before training.
    """

    measure: Callable[[Subject], Any]
    row: Callable[[Subject, Any, Any], dict[str, Any]]
    before: bool = False


def _as_measured(subject: Subject, before: Any, after: dict[str, Any]) -> dict[str, Any]:
    return after


JUDGES = {
    "held_out": Judge(held_out, _held_out_row, before=True),
    "own_teacher": Judge(_own_teacher, _own_teacher_row, before=True),
    "run_figures": Judge(lambda subject: subject.started.results.measure(), _run_figures_row, before=True),
    "own_answers": Judge(_own_answers, _as_measured),
    "answers": Judge(_exact, _as_measured),
    "sums_right": Judge(_sums_right, _as_measured),
    "size": Judge(_size, _as_measured),
}


def shown(row: dict[str, Any]) -> str:
    """Return the main figures of a row in a line."""
    if "after" in row:
        found = row["after"]["forward_kl"]
        if not isinstance(found, list):
            return f"KL {row['before']['forward_kl']:.3f} to {found:.3f}"
        value, low, high = found
        return f"KL {row['before']['forward_kl']:.3f} to {value:.3f} ({low:.3f} to {high:.3f})"
    right = {name: bits for name, bits in row["right"].items() if isinstance(bits, str)}
    return ", ".join(f"{name} {bits.count('1') / len(bits):.1%}" for name, bits in right.items())
