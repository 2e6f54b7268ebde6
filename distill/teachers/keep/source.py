"""A model whose words are kept, before it is loaded: its folder, whose it is, what is missing there.

Weights are read where a document of the run's data is not stored, or a student is cut that is not. A folder may have
been begun by another run, with other data, losses and students, by `distill cache`, or by a run that was killed: what
is there is used. It must be the same teacher's, as it is computed here: a mixture of two would be nobody's word.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from distill.core.faults import differences
from distill.core.files import make_folder
from distill.core.ranks import of_the_first
from distill.core.units import GIB
from distill.data.load import Splits
from distill.models.meta import meta_config, meta_student
from distill.models.precision import resolve_device, resolve_precision
from distill.models.pruning import layer_indices, layers_of
from distill.recipe import Data, Recipe
from distill.teachers.base import Footprint, FootprintContext, OpenContext, TeacherSource
from distill.teachers.cache.format import (
    HEAD,
    MANIFEST,
    PLAN,
    STUDENT,
    Plan,
    bytes_a_token,
    documents_of,
    read_json,
    rows_of,
    write_signed,
)
from distill.teachers.cache.identity import require_same_teacher
from distill.teachers.cache.plan import EncodableTeacher, Origin, encodable, plan_of, write_companions
from distill.teachers.cache.read import TeacherCache
from distill.teachers.cache.settings import Settings, default_tail
from distill.teachers.cache.teacher import stored_footprint
from distill.teachers.keep.store import Store
from distill.teachers.keep.teacher import KeptTeacher, StoredTeacher
from distill.teachers.measure import KL, Measure, over_stored
from distill.teachers.model import LoadedTeacher, ModelSource
from distill.teachers.vocabulary import Match, Vocabulary


class KeepSource(ModelSource):
    """A model that will be loaded if anything is missing in `teacher.keep`.

    Attributes:
        folder: where its words are kept; None for nowhere, which `keep: /dev/null` asks for, as doctor does.
        required: positions to store of every document of the data, by its key; empty until these are read.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        assert self.section.keep is not None
        self.folder = None if self.section.keep == os.devnull else Path(self.section.keep).expanduser()
        self.required: dict[bytes, int] = {}
        self.digest = ""
        self._dtype: torch.dtype | None = None

    @property
    def plan(self) -> Plan | None:
        """Of what is stored; None where nothing is."""
        return read_json(self.folder / PLAN) if self.folder else None

    def vocabulary(self) -> Vocabulary:
        return KeepVocabulary(self)

    def settings(self) -> Settings:
        """What the recipe stores; hidden states in the dtype that they have, which is known once the model is here."""
        section, dtype = self.section, {"hidden_fp8": "fp8", "top_k": "float16"}.get(self.section.keep_as)
        return Settings(section.top_k or 64, section.keep_as != "top_k", default_tail(self.recipe.loss), dtype)

    def measure(self) -> Measure:
        if (plan := self.plan) is not None:
            return over_stored(plan)
        return KL if self.settings().hidden else Measure("KL over what is stored")

    def follow(self, other: TeacherSource) -> None:
        if isinstance(other, KeepSource) and self.recipe.data == other.recipe.data:
            self.required = other.required

    def missing(self) -> list[bytes]:
        """Documents of the data that are not stored."""
        plan = self.plan
        return list(self.required) if plan is None else Store(plan, self.folder, self.required, all_parts=True).missing

    def data_problems(self, splits: Splits | None = None) -> list[str]:
        """That the disk is too small for the data that were read last."""
        if self.folder is None:
            return []
        left = sum(self.required[key] for key in self.missing()) * self._width()
        ancestor = next(place for place in (self.folder, *self.folder.absolute().parents) if place.exists())
        free = shutil.disk_usage(ancestor).free
        if left <= free:
            return []
        return [
            f"teacher.keep: {left / GIB:,.1f} GiB more are stored ({self._width():,} bytes a learned token), and "
            f"{ancestor} has {free / GIB:,.1f} GiB free; use keep_as: hidden_fp8 or top_k, or another disk"
        ]

    def footprint(self, context: FootprintContext) -> Footprint:
        """As of the loaded teacher, and what is read; the head of a sharded one stays whole beside the shards. Of one
        whose words on these data are all stored, as of a cache: it is not loaded."""
        if self.required and not self.missing() and (plan := self.plan) is not None:
            return stored_footprint(plan, self.meta().shape)
        loaded, self._dtype = super().footprint(context), context.precision.teacher
        head = self.meta().shape.head * context.precision.teacher.itemsize if context.sharded else 0.0
        return loaded._replace(weights=loaded.weights + head, token_bytes=2 * loaded.token_bytes)

    def size_text(self) -> str:
        """The model's size, and bytes on disk."""
        width, count = self._width(), sum(self.required.values())
        amount = f"{width * count / GIB:,.2f} GiB for the {count:,} of these data"
        if not count:
            amount = f"{width * 1e8 / GIB:,.0f} GiB for each 100 M"
        text = f"{super().size_text()}; keep: {self.section.keep}, {width:,} bytes a learned token, {amount}"
        if count and (present := count - sum(self.required[key] for key in self.missing())):
            text += f", {present / count:.0%} of them stored already" + (": it is not loaded" * (present == count))
        return text

    def _width(self) -> int:
        settings, shape = self.settings(), self.meta().shape
        if self._dtype is None:
            self._dtype = resolve_precision(self.recipe, resolve_device(self.recipe.train)).teacher
        dtype = settings.dtype or str(self._dtype).removeprefix("torch.")
        kind = {"kind": "hidden" if settings.hidden else "top_k", "dtype": dtype, "k": settings.k}
        return bytes_a_token({**kind, "hidden": shape.hidden, "vocabulary": shape.vocabulary})

    def open(self, context: OpenContext, vocabulary: Vocabulary) -> KeptTeacher | StoredTeacher:  # type: ignore[override]
        """Open what is stored, and load the model where anything is missing.

        Raises:
            ValueError: the folder holds something else, or what another teacher said, with the first difference.
        """
        self._dtype = context.precision.teacher

        def load() -> LoadedTeacher:
            return super(KeepSource, self).open(context, vocabulary)

        if self.folder is not None and of_the_first(lambda: self._is_complete(vocabulary)):
            return StoredTeacher(TeacherCache(self.folder), context.device, load)
        inner = load()
        parts = encodable(inner, context.device)
        settings, student = self.settings(), self.recipe.student
        settings = settings._replace(dtype=settings.dtype or str(parts.head.weight.dtype).removeprefix("torch."))
        columns = len(parts.head.weight) if settings.hidden else self._columns(vocabulary, len(parts.head.weight))
        layers = layer_indices(student.from_teacher, layers_of(inner.model.config)) if student.is_cut else None
        origin = Origin(self.recipe, self.digest, vocabulary.tokenizer, vocabulary.id_bound, layers)
        plan = plan_of(origin, settings, parts, columns)
        plan["weights"] = None if inner.is_collective else inner.fingerprint()["weights"]
        if self.folder is not None:
            stored: Plan = of_the_first(lambda: self._begin(plan, inner, parts, context))
        return KeptTeacher(inner, Store(plan if self.folder is None else stored, self.folder, self.required), parts)

    def _is_complete(self, vocabulary: Vocabulary) -> bool:
        """Whether all is stored; then the cache is closed."""
        assert self.folder is not None
        if (plan := self.plan) is None:
            if self.folder.exists() and any(self.folder.iterdir()):
                raise ValueError(f"teacher.keep: {self.folder} is not empty and holds no cache; name another folder")
            return False
        require_same_teacher(self.recipe, vocabulary.tokenizer, plan, self.folder)
        settings = self.settings()
        self._require_same(plan, {"kind": "hidden" if settings.hidden else "top_k", "k": settings.k})
        store = Store(plan, self.folder, self.required, all_parts=True)
        if not self.required or store.missing or (store.is_hidden and not (self.folder / HEAD).is_file()):
            return False
        if store.writes:
            store.close()
        return (self.folder / MANIFEST).is_file()

    def _begin(self, plan: Plan, inner: LoadedTeacher, parts: EncodableTeacher, context: OpenContext) -> Plan:
        """Begin a cache in the folder, or go on with the one that is there; returns its plan."""
        assert self.folder is not None
        if problems := self.data_problems():
            raise ValueError(problems[0])
        if (begun := self.plan) is not None:
            self._require_same(begun, plan)
            plan = begun
        else:
            make_folder(self.folder)
            write_signed(self.folder / PLAN, plan)
        if not (self.folder / MANIFEST).is_file():
            cut, student = None, self.recipe.student
            if student.is_cut and plan["student_layers"] is not None and not (self.folder / STUDENT).is_dir():
                plain = student.model_copy(update={"lora": None})
                cut = inner.cut_student(plain, torch.device("cpu"), context.precision.student).model
            head = parts.head if plan["kind"] == "hidden" else None
            write_companions(self.folder, inner.model, inner.tokenizer, head, cut)
        return plan

    def _require_same(self, begun: Plan, now: Plan) -> None:
        """Hold that what is stored is what this run would store; ValueError with the first difference."""
        same = ("kind", "dtype", "hidden", "scale", "softcap", "weights", *(["k"] if begun["kind"] == "top_k" else []))
        flat = [{**plan, "teacher.dtype": plan.get("teacher", {}).get("dtype")} for plan in (begun, now)]
        names = [name for name in (*same, "teacher.dtype") if all(plan.get(name) is not None for plan in flat)]
        first, second = ({name: plan[name] for name in names} for plan in flat)
        for name, old, new in differences(first, second):
            raise ValueError(
                f"teacher.keep: {self.folder} was begun with other settings: {name} was {old!r}, now {new!r}; name "
                "another folder"
            )

    def _columns(self, vocabulary: Vocabulary, rows: int) -> int:
        """Columns that K tokens are taken of: those that the recipe's student has too."""
        student = self.recipe.student.model_copy(update={"lora": None})
        own = meta_student(student, meta_config(self.section, "teacher")).shape.vocabulary
        if student.vocabulary == "extend" and vocabulary.tokenizer is not None:
            return min(rows, max(own, len(vocabulary.tokenizer)))
        return Vocabulary.match(vocabulary, [rows], own).columns or rows


class KeepVocabulary(Vocabulary):
    """The model's tokenizer; what it makes of the data is what has to be stored."""

    def __init__(self, source: KeepSource) -> None:
        super().__init__(source.recipe, source.section, (source.plan or {}).get("ids_below"))
        self.source = source

    def read(self, data: Data, seed: int) -> Splits:
        splits = super().read(data, seed)
        rows = (row for split in (splits.train, splits.validation) for row in rows_of(split))
        self.source.required = {d.key: len(d.predicting) for row in rows for d in documents_of(row)}
        self.source.digest = splits.report.digest
        return splits

    def match(self, teacher_rows: list[int], student_rows: int) -> Match:
        """The format holds that the student has the columns that K tokens were taken of."""
        match = super().match(teacher_rows, student_rows)
        return match if self.source.settings().hidden else match._replace(columns=None)
