"""Runs of the second plan's configurations: caches written on demand, stages one after another.

Whatever a student learned from, it is judged against the loaded teacher over the whole vocabulary. After the second
part it is judged on its own words too: answers to the held-out prompts, drawn at T = 1, on which the teacher's
distribution is compared with the student's; and by its likeliest answers' final numbers.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from distill.commands.cache_epoch import Loaded, make_cache
from distill.core import console
from distill.data.chat import template_of
from distill.data.collator import Collator
from distill.evaluation.evaluate_documents import evaluate_documents
from distill.generation.decode_loop import DecodeEngine
from distill.generation.documents import RolloutDocument, as_row, documents_of
from distill.generation.engines import engine_for, settings_for
from distill.generation.sampling import Sampling
from distill.models.head import find_head, probe_logits
from distill.models.patch.attention_choice import AttentionChoices
from distill.models.sharding import SINGLE_PROCESS
from distill.recipe import Recipe
from distill.teachers.backends.local import LoadedTeacher, LocalPlan
from distill.teachers.backends.stored.contents import head_of
from distill.teachers.backends.stored.plan import StoredPlan
from distill.teachers.backends.stored.settings import CacheOptions
from distill.teachers.backends.stored.store import Store
from distill.teachers.backends.stored.teacher import StoredTeacher
from distill.teachers.load_context import LoadContext
from distill.teachers.opening import ModelPair
from distill.teachers.vocabulary import Vocabulary
from scripts.study.runs import Bench, Judged, free, row_of, train
from scripts.study.teachers import OWN, K, TeacherSetup

LONGEST = 256  # tokens of an answer that is judged
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class TeacherBench(Bench):
    """A bench that also keeps caches, students after the first stage, and how often the teacher is right."""

    def __init__(self, setups: Sequence[TeacherSetup], held_out: int = 128) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="study-caches-")
        self._caches: dict[tuple[str, str], Store] = {}
        self._stages: dict[tuple[str, ...], dict[str, torch.Tensor]] = {}
        self._right: dict[str, list[int]] = {}
        super().__init__(setups, held_out)

    def cache(self, setup: TeacherSetup, recipe: Recipe, student: Any) -> Store:
        """Return the cache of the teacher's outputs on a configuration's data, written on first use."""
        assert setup.tail is not None
        key = (setup.data, setup.tail)
        if key not in self._caches:
            folder = Path(self._folder.name) / f"{setup.data}-{setup.tail}"
            rows = min(len(find_head(model).linear.weight) for model in (self.teacher, student))
            teacher = LoadedTeacher(self.teacher, tokenizer=self.tokenizer)
            splits, vocabulary = self.splits(setup), Vocabulary(recipe, recipe.teacher)
            section = recipe.teacher.model_copy(update={"online_cache": str(folder)})
            keep = StoredPlan(recipe, section, inner=LocalPlan(recipe))
            keep.note_data(splits)
            loaded = Loaded(
                recipe,
                splits,
                ModelPair(teacher, student, vocabulary, rows, "", None),
                keep,
                teacher,
                LoadContext(self.device, self.precision, SINGLE_PROCESS, AttentionChoices(recipe)),
                vocabulary,
                head_of(teacher),
                probe_logits(student, "student"),
                is_ready=True,
            )
            settings = CacheOptions(K, tail=setup.tail).checked()
            make_cache(
                loaded,
                folder,
                settings,
                say=functools.partial(print, flush=True),
                progress=functools.partial(_quietly, f"caching, {setup.tail}"),
            )
            self._caches[key] = Store(folder)
        return self._caches[key]

    def after_first_stage(self, setup: TeacherSetup, student: Any) -> None:
        """Give `student` the weights it has after the first stage, which is trained once for each seed."""
        recipe = setup.stage_before()
        if setup.first not in self._stages:
            train(recipe, self, student, self.splits(setup))
            self._stages.clear()  # seeds follow each other: no other is asked for again
            self._stages[setup.first] = {name: tensor.cpu().clone() for name, tensor in student.state_dict().items()}
        student.load_state_dict(self._stages[setup.first])

    def teacher_right(self, setup: TeacherSetup, recipe: Recipe) -> list[int]:
        """Return how many held-out problems the teacher solves, and how many there are."""
        if setup.data not in self._right:
            self._right[setup.data] = right(self.teacher, self, self.documents(setup), recipe)
        return self._right[setup.data]

    def documents(self, setup: TeacherSetup) -> list[RolloutDocument]:
        """The held-out documents."""
        rows = self.splits(setup).validation
        return documents_of(Collator(0)([rows[number] for number in range(len(rows))]))

    def engine(self, model: Any, recipe: Recipe) -> DecodeEngine:
        """Return the generation engine for `model`."""
        template = template_of(recipe.data, self.tokenizer)
        settings = settings_for(
            model, self.tokenizer, template, autocast=self.precision.autocast, max_length=recipe.data.max_length
        )
        return engine_for("distill", model, settings)


def run_one(setup: TeacherSetup, bench: TeacherBench) -> dict[str, Any]:
    """Train one configuration and judge it: the row of the results, without what the machine is."""
    recipe, splits = setup.recipe(), bench.splits(setup)
    student: Any = bench.student(setup, recipe)
    kind: dict[str, Any] = {}
    if setup.tail is not None:
        cache = bench.cache(setup, recipe, student)
        kind = {"teacher": StoredTeacher(cache, device=bench.device)}
    if setup.first:
        bench.after_first_stage(setup, student)
        before = bench.judge(student, setup, recipe)
    else:
        before = bench.before(student, setup, recipe)
    quality = Judged(bench, setup, recipe)
    took = train(recipe, bench, student, splits, quality, **kind)
    row = row_of(setup, recipe, before, bench.judge(student, setup, recipe), quality.curve, took)
    row |= {"plan": "teachers", "part": setup.part, "learned_tokens": took.learned}
    if setup.part == OWN:
        row |= on_policy_metrics(student, bench, setup, recipe)
    del quality, student
    free(bench)
    return row


class Answers(NamedTuple):
    """A model's responses to held-out prompts: documents with them, and the share cut off."""

    documents: list[RolloutDocument]
    truncated: float


def answer(
    model: Any, bench: TeacherBench, documents: Sequence[RolloutDocument], recipe: Recipe, *, drawn: bool
) -> Answers:
    """Answers to the documents' prompts, drawn at T = 1 or the likeliest ones; the same prompt draws by one seed."""
    prompts = [document.prompt for document in documents]
    made = bench.engine(model, recipe).generate(
        prompts,
        max_new_tokens=[min(LONGEST, recipe.data.max_length - len(prompt)) for prompt in prompts],
        sampling=Sampling(float(drawn)),
        seeds=list(range(len(prompts))),
    )
    told = zip(documents, prompts, made.tokens, strict=True)
    return Answers(
        [document.with_response(prompt, tokens) for document, prompt, tokens in told],
        sum(made.truncated) / max(len(prompts), 1),
    )


def on_policy_metrics(student: Any, bench: TeacherBench, setup: TeacherSetup, recipe: Recipe) -> dict[str, Any]:
    """Return metrics of a student on its own responses to held-out prompts, and its number of solved problems."""
    documents = bench.documents(setup)
    said = answer(student, bench, documents, recipe, drawn=True)
    found = evaluate_documents(
        student,
        bench.teacher,
        [as_row([document]) for document in said.documents],
        batch_size=recipe.train.batch_size,
        autocast=bench.precision.autocast,
    )
    figures: dict[str, Any] = {name: list(figure) for name, figure in found.figures.items()}
    figures |= {"answers": len(documents), "length": found.tokens / len(documents), "truncated": said.truncated}
    return {
        "own": figures,
        "right": right(student, bench, documents, recipe),
        "teacher_right": bench.teacher_right(setup, recipe),
    }


def right(model: Any, bench: TeacherBench, documents: Sequence[RolloutDocument], recipe: Recipe) -> list[int]:
    """Return the number of problems that the greedy response solves, and the number of problems."""
    said = answer(model, bench, documents, recipe, drawn=False).documents
    pairs = [
        [_text(bench, one.ids[len(one.prompt) :]) for one in (document, other)]
        for document, other in zip(documents, said, strict=True)
    ]
    numbers = [[final_number(text) for text in pair] for pair in pairs]
    return [sum(true == given and true is not None for true, given in numbers), len(numbers)]


def _text(bench: TeacherBench, ids: Sequence[int]) -> str:
    return str(bench.tokenizer.decode(list(ids), skip_special_tokens=True))


def final_number(text: str) -> float | None:
    """The number after the last `####`, which closes an answer of GSM8K, else the last number of all."""
    _, mark, rest = text.rpartition("####")
    numbers = NUMBER.findall(rest)
    if not numbers:
        return None
    return float(numbers[0 if mark else -1].replace(",", ""))


def _quietly(what: str, total: int) -> Any:
    """A line of progress in a terminal."""
    import contextlib

    @contextlib.contextmanager
    def bar() -> Any:
        with console.spinner(what, total):
            yield console.advance

    return bar()
