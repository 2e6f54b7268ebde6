"""The plan of stored outputs: a folder that is read, and filled by the teacher inside while it is.

Any source may be inside: of a loaded model, sharded or not, or of servers. It is opened where a document of the run's
data is not stored, or a student is cut that is not. A folder may have been begun by another run, with other data,
losses and students, by `distill cache`, or by a run that was killed: what is there is used. It must be of the same
teacher, as it is computed here. The plan of `teacher.type: cache`, whose folder is complete, is in `archived.py`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from distill.core.diff_settings import diff_settings
from distill.core.files import free_bytes, make_folder, nearest_existing
from distill.core.ranks import broadcast_from_rank0, is_main_process, world_size
from distill.core.units import GIB
from distill.data.load import Splits, load_data
from distill.models.dtypes import resolve_device, resolve_precision
from distill.models.layers import layers_of
from distill.models.load.vocabulary import shared_columns
from distill.models.meta_models import meta_config, meta_student
from distill.objectives.measure import Measure, cache_measure
from distill.objectives.top_k import TopKFormat
from distill.recipe import Data, Student, TeacherConfig
from distill.recipe.models import EIGHT_BITS
from distill.teachers.backends.stored.archived import stored_footprint, teacher_of_cache
from distill.teachers.backends.stored.format import (
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
from distill.teachers.backends.stored.identity import require_same_teacher
from distill.teachers.backends.stored.plan import (
    LogitHead,
    Origin,
    begin_lock,
    head_of,
    hidden_content,
    plan_of,
    write_companions,
)
from distill.teachers.backends.stored.settings import Settings, default_tail
from distill.teachers.backends.stored.store import Store
from distill.teachers.backends.stored.teacher import CachedTeacher, StoredTeacher
from distill.teachers.base import InnerPlan, Teacher, TeacherPlan
from distill.teachers.calibration import cut_identity
from distill.teachers.footprint import Footprint, FootprintContext
from distill.teachers.load_context import CutRequest, LoadContext
from distill.teachers.vocabulary import Vocabulary

BEGINS_WITHIN_S = 1800.0  # seconds; machines load a teacher at different speeds


class StoredPlan(TeacherPlan):
    """The plan of a teacher that is opened if anything is missing in its folder.

    Args:
        inner: Plan of the teacher.
        section: Section of the recipe whose `online_cache` names the folder.
        field: Field of the recipe that holds the section, such as `teachers.1`.
        writes: False to store nothing in that folder: outputs are dropped with their batch.

    Attributes:
        folder: where outputs are stored; None for nowhere: of `teacher.top_k` alone, and as doctor uses it.
        required: Number of positions to store of every document of the data, by its key; empty until the data are read.
        noted: Rows of these documents; None until the data are read.
        chosen: Settings of what is stored, where a command decides; None for the recipe's.
        option: Option of the command that names the folder; None for the recipe's `online_cache`.
    """

    def __init__(
        self, inner: TeacherPlan, section: TeacherConfig, field: str = "teacher", *, writes: bool = True
    ) -> None:
        super().__init__(inner.recipe, section, field)
        self.inner = inner
        self.sections = inner.sections
        self.shardable = inner.shardable
        folder = section.store
        self.folder = Path(folder).expanduser() if folder is not None and writes else None
        self.required: dict[bytes, int] = {}
        self.noted: Splits | None = None
        self.chosen: Settings | None = None
        self.option: str | None = None
        self._dtype: torch.dtype | None = None

    @property
    def plan(self) -> Plan | None:
        """Plan of what is stored; None where nothing is, or a cache is not complete that is only read."""
        return read_json(self.folder / PLAN) if self.folder else None

    def parts(self) -> list[InnerPlan]:
        return [InnerPlan(self.inner, lambda splits: splits)]

    def vocabulary(self) -> Vocabulary:
        """Return the teacher's vocabulary, whose rows are noted as they are read; random ids as when it was begun."""
        inner = self.inner.vocabulary()

        def read(data: Data, seed: int) -> Splits:
            splits = load_data(data, vocabulary.tokenizer, seed=seed, vocab_size=vocabulary.id_bound)
            self.note_data(splits)
            return splits

        begun = self.plan or {}
        vocabulary = inner.with_reader(read, begun.get("ids_below"), top_k=not self.settings().hidden)
        return vocabulary

    @property
    def sent_top_k(self) -> bool:
        """True where servers send K tokens, which are stored as received."""
        return bool(self.section.urls) and self.section.top_tokens is not None

    def settings(self) -> Settings:
        """Return what the recipe stores; hidden states in their own dtype, which is known once the teacher is open."""
        if self.chosen is not None and not self.sent_top_k:
            return self.chosen
        section = self.section
        hidden = section.store_format != "top_k" and section.top_tokens is None
        dtype = {"hidden_fp8": "fp8", "top_k": "float16"}.get(section.store_format)
        if self.folder is None and not hidden:  # nothing is written, and a drawn token would depend on the batch
            return Settings(section.top_tokens or 64, dtype="float32")
        return Settings(section.top_tokens or 64, hidden, default_tail(self.recipe.loss), dtype)

    def measure(self) -> Measure:
        plan = self.plan
        if plan is not None:
            return cache_measure(plan)
        if self.sent_top_k:
            return self.inner.measure()
        settings = self.settings()
        kind = "hidden" if settings.hidden else "top_k"
        temperature = self.recipe.loss.temperature
        return cache_measure({"kind": kind, "k": settings.k, "tail": settings.tail, "temperature": temperature})

    def copy_cached_state(self, other: TeacherPlan) -> None:
        if not isinstance(other, StoredPlan):
            return
        self.inner.copy_cached_state(other.inner)
        if self.recipe.data == other.recipe.data:
            self.required = other.required
            self.noted = other.noted

    def note_data(self, splits: Splits) -> None:
        """Note the documents that have to be stored."""
        rows = (row for split in (splits.train, splits.validation) for row in rows_of(split))
        self.required = {d.key: len(d.predicting) for row in rows for d in documents_of(row)}
        self.noted = splits

    def missing(self) -> list[bytes]:
        """Return the documents of the data that are not stored."""
        plan = self.plan
        return list(self.required) if plan is None else Store(plan, self.folder, self.required, all_parts=True).missing

    def data_problems(self, splits: Splits) -> list[str]:
        """Return the teacher's problems, and one where the disk is too small for the data that were noted last."""
        return [*self.inner.data_problems(splits), *self.room_problems()]

    def room_problems(self) -> list[str]:
        """Return a message where the disk is too small for the data that were noted last."""
        if self.folder is None:
            return []
        left = sum(self.required[key] for key in self.missing()) * self._width()
        free = free_bytes(self.folder)
        if left <= free:
            return []
        fewer = "fewer tokens (--top-k, data.max_rows)" if self.option else "online_cache_format: hidden_fp8 or top_k"
        return [
            f"{self.place}: {left / GIB:,.1f} GiB more are stored ({self._width():,} bytes per trained token), and "
            f"{nearest_existing(self.folder)} has {free / GIB:,.1f} GiB free; use {fewer}, or another disk"
        ]

    @property
    def place(self) -> str:
        """The setting or option that names the folder, for messages."""
        return self.option or f"{self.field}.online_cache"

    def footprint(self, context: FootprintContext) -> Footprint:
        """Return the teacher's footprint and that of what is read; the head of a sharded one stays whole beside the
        shards. Where all outputs for these data are stored, it is a cache's: the teacher is not opened.
        """
        shape = self.shapes()[0]
        if self.required and not self.missing() and (plan := self.plan) is not None:
            return stored_footprint(plan, shape)
        opened = self.inner.footprint(context)
        self._dtype = context.precision.teacher
        head = shape.head * context.precision.teacher.itemsize if context.sharded else 0.0
        return opened._replace(weights=opened.weights + head, token_bytes=2 * opened.token_bytes)

    def size_text(self) -> str:
        """Return the teacher's size and the bytes on disk, in words."""
        if self.folder is None and not self.settings().hidden:
            return f"{self.inner.size_text()}; {self.settings().k} tokens of each distribution"
        width = self._width()
        count = sum(self.required.values())
        amount = f"{width * count / GIB:,.2f} GiB for the {count:,} of these data"
        if not count:
            amount = f"{width * 1e8 / GIB:,.0f} GiB for each 100 M"
        stored = f"online_cache: {self.section.store}, {width:,} bytes per trained token, {amount}"
        text = f"{self.inner.size_text()}; {stored}"
        if count and (present := count - sum(self.required[key] for key in self.missing())):
            text += f", {present / count:.0%} of them stored already"
            if present == count:
                text += ": it is not loaded"
        return text

    def _width(self) -> int:
        settings = self.settings()
        shape = self.shapes()[0]
        if self._dtype is None:
            self._dtype = resolve_precision(self.recipe, resolve_device(self.recipe.train)).teacher
        dtype = settings.dtype or self.inner.stored_dtype() or str(self._dtype).removeprefix("torch.")
        kind = {"kind": "hidden" if settings.hidden else "top_k", "dtype": dtype, "k": settings.k}
        return bytes_a_token({**kind, "hidden": shape.hidden, "vocabulary": shape.vocabulary})

    def maker(self) -> dict[str, object] | None:
        return self.inner.maker()

    def open(self, context: LoadContext, vocabulary: Vocabulary) -> CachedTeacher:
        """Open what is stored, and the teacher where anything is missing.

        Raises:
            ValueError: the folder holds something else, or outputs of another teacher, with the first difference.
        """
        self._dtype = context.precision.teacher
        if self.folder is not None and broadcast_from_rank0(lambda: self._is_complete(vocabulary)):
            return teacher_of_cache(self.folder, context.device, lambda: self.inner.open(context, vocabulary))
        inner = self.inner.open(context, vocabulary)
        return self.around(inner, context, vocabulary, head_of(inner))

    def around(
        self, inner: Teacher, context: LoadContext, vocabulary: Vocabulary, head: LogitHead | None
    ) -> StoredTeacher:
        """Return the store around a teacher that is open, and whose head is `head`; its folder is begun.

        Raises:
            ValueError: the folder holds something else, or outputs of another teacher, with the first difference.
        """
        self._dtype = context.precision.teacher
        student = self.recipe.student
        layers = None
        content: Mapping[str, object]
        # Without a head, servers send K tokens: they are stored as they come. With one, hidden states are stored and
        # the head once beside them, or K tokens that are computed from both.
        if head is None:
            assert isinstance(inner.format, TopKFormat)
            content = {**inner.format.manifest}
            dtype = None
            sent = self.inner.stored_dtype()
            if sent is not None:
                content = {**content, "dtype": sent}
        else:
            settings = self.settings()
            dtype = str(head.weights.weight.dtype).removeprefix("torch.")
            settings = settings._replace(dtype=settings.dtype or dtype)
            rows = len(head.weights.weight)
            columns = rows if settings.hidden else self._columns(vocabulary, rows)
            content = hidden_content(settings, head, columns, self.recipe.loss.temperature)
        if student.is_cut:
            assert student.from_teacher is not None
            config = meta_config(self.config_section(), self.field)
            layers = cut_identity(student.from_teacher, layers_of(config))
        tokenizer = vocabulary.teacher_tokenizer
        digest = "" if self.noted is None else self.noted.report.digest
        origin = Origin(self.recipe, digest, tokenizer, vocabulary.id_bound, layers)
        maker = {"dtype": self.section.held if self.section.dtype in EIGHT_BITS else dtype} | (self.maker() or {})
        plan = plan_of(origin, content, maker)
        if self.option is None:
            plan["weights"] = None if inner.is_collective() else inner.fingerprint().get("weights")
        if self.folder is not None:
            # the first process writes the plan; the others use what it wrote, or what another run wrote before
            teacher = StoredTeacher(inner, Store(plan, None, {}), head=head)
            begin = functools.partial(self._begin, plan, teacher, context, tokenizer)
            together = torch.distributed.is_available() and torch.distributed.is_initialized()
            agreed = broadcast_from_rank0(begin) if together or world_size() == 1 else self._begin_apart(begin, plan)
            plan = dict(agreed)
        store = Store(plan, self.folder, self.required, all_parts=self.option is not None)
        return StoredTeacher(inner, store, context.device, head)

    def _begin_apart(self, begin: Callable[[], Plan], plan: Plan) -> Plan:
        """Begin the cache, or wait for the first process to do so, in processes that are not connected."""
        if is_main_process():
            return begin()
        assert self.folder is not None
        until = time.monotonic() + BEGINS_WITHIN_S
        while (begun := self.plan) is None:
            if time.monotonic() > until:
                raise ValueError(
                    f"{self.place}: {self.folder} was not begun by the first process; expected a folder "
                    "that all machines share"
                )
            time.sleep(0.2)
        self._require_same(begun, plan)
        return begun

    def _is_complete(self, vocabulary: Vocabulary) -> bool:
        """Return whether all is stored; then the cache is closed."""
        assert self.folder is not None
        plan = self.plan
        if plan is None:
            self._require_empty()
            return False
        require_same_teacher(self.maker(), self.recipe, vocabulary.teacher_tokenizer, plan, self.folder)
        settings = self.settings()
        self._require_same(plan, {"kind": "hidden" if settings.hidden else "top_k", "k": settings.k})
        store = Store(plan, self.folder, self.required, all_parts=True)
        if not self.required or store.missing or (store.is_hidden and not (self.folder / HEAD).is_file()):
            return False
        # a run that was killed after its last document has not written the manifest: with it, nothing is opened now
        if store.writes:
            store.close()
        return (self.folder / MANIFEST).is_file()

    def _begin(self, plan: Plan, kept: StoredTeacher, context: LoadContext, tokenizer: object) -> Plan:
        """Begin a cache in the folder, or go on with the one that is there; returns its plan."""
        assert self.folder is not None
        self._require_empty()
        make_folder(self.folder)
        with begin_lock(self.folder):  # several runs may begin one store at once, as a sweep over seeds does
            return self._begin_locked(plan, kept, context, tokenizer)

    def _begin_locked(self, plan: Plan, kept: StoredTeacher, context: LoadContext, tokenizer: object) -> Plan:
        assert self.folder is not None
        begun = self.plan
        if begun is not None:
            self._require_same(begun, plan)
        problems = self.room_problems()
        if problems:
            raise ValueError(problems[0])
        if begun is not None:
            plan = begun
        else:
            write_signed(self.folder / PLAN, plan)
        if not (self.folder / MANIFEST).is_file():
            cut = None
            student = self.recipe.student
            # a run that finds everything stored does not open the teacher, so the student that is cut from it lies here
            if student.is_cut and plan["student_layers"] is not None and not (self.folder / STUDENT).is_dir():
                plain = student.model_copy(update={"lora": None})
                alone = context.calibration._replace(shares=False)  # this process begins for all
                request = CutRequest(plain, torch.device("cpu"), context.precision.student, alone)
                cut = kept.cut_student(request).model
            models = [*kept.models.values()]
            config = models[0].config if models else meta_config(self.config_section(), self.field)
            head = kept.head.weights if kept.head is not None and plan["kind"] == "hidden" else None
            write_companions(self.folder, config, tokenizer, head, cut)
        return plan

    def _require_empty(self) -> None:
        """Check that a folder without a plan is empty, but for locks and temporary files.

        The plan is the first other file that is written, so it is looked for after the others: another run may begin
        the store meanwhile.
        """
        assert self.folder is not None
        others = self.folder.exists() and any(not path.name.startswith(".") for path in self.folder.iterdir())
        if others and self.plan is None:
            raise ValueError(f"{self.place}: {self.folder} is not empty and holds no cache; name another folder")

    def _require_same(self, begun: Plan, now: Plan) -> None:
        """Check that what is stored is what this run would store; ValueError with the first difference."""
        # Names that only one of the plans has are not compared: `weights` is unknown for a sharded teacher. A run
        # takes tail and temperature from the folder (`measure`); a command asks for its own.
        of_top_k = ["k", *(["tail", "temperature"] if self.option else [])] if begun["kind"] == "top_k" else []
        same = ("kind", "dtype", "hidden", "scale", "softcap", "weights", *of_top_k)
        flat = [{**plan, "teacher.dtype": plan.get("teacher", {}).get("dtype")} for plan in (begun, now)]
        names = [name for name in (*same, "teacher.dtype") if all(plan.get(name) is not None for plan in flat)]
        first, second = ({name: plan[name] for name in names} for plan in flat)
        for name, old, new in diff_settings(first, second):
            raise ValueError(
                f"{self.place}: {self.folder} was begun with other settings: {name} was {old!r}, now {new!r}; "
                "name another folder"
            )

    def _columns(self, vocabulary: Vocabulary, rows: int) -> int:
        """Return the columns that K tokens are taken from: those that the recipe's student has too."""
        student: Student = self.recipe.student.model_copy(update={"lora": None})
        if student.vocabulary == "cross":
            return rows
        own = meta_student(student, meta_config(self.config_section(), self.field)).shape.vocabulary
        if student.vocabulary == "extend" and vocabulary.tokenizer is not None:
            return min(rows, max(own, len(vocabulary.tokenizer)))
        return min(rows, shared_columns(vocabulary.tokenizer, vocabulary.student_tokenizer, rows, own)[0])
