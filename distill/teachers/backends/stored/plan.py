"""The plan of a teacher by its store: a folder that is read, and filled by the teacher inside while it is.

`teacher.online_cache` fills one. Any plan may be inside: of a loaded model, sharded or not, or of servers. The teacher
is opened where a document of the run's data is not stored, or a student is cut that is not. `teacher.type: cache` only
reads one, which `distill cache` or a run has completed; no plan is inside.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from distill.core.environment import environment
from distill.core.files import free_bytes, nearest_existing
from distill.core.ranks import broadcast_from_rank0
from distill.core.units import GIB
from distill.data.load import Splits, load_data
from distill.models.dtypes import resolve_device, resolve_precision
from distill.models.flops import head_flops
from distill.models.head import LogitTransform
from distill.models.layers import layer_count
from distill.models.load.vocabulary import shared_columns
from distill.models.meta_models import meta_config, meta_student
from distill.models.shape import ModelSizes
from distill.objectives.measure import DivergenceUnit, cache_measure
from distill.objectives.row_packing import DTYPES
from distill.objectives.targets import VocabularyAlignment
from distill.objectives.top_k import TopKFormat
from distill.recipe import Data, ModelSection, Recipe, StoredTeacherConfig, TeacherConfig
from distill.recipe.models import LOW_BITS
from distill.teachers.backends.stored.begin import StoreFolder
from distill.teachers.backends.stored.contents import LogitHead, head_of, hidden_content, write_companions
from distill.teachers.backends.stored.format import (
    HEAD,
    MANIFEST,
    PLAN,
    STUDENT,
    TEACHER,
    TOKENIZER,
    VERSION,
    Plan,
    bytes_a_token,
    manifest_of,
    read_store_json,
    rows_of,
    stored_documents,
    stored_folder,
)
from distill.teachers.backends.stored.identity import (
    data_settings,
    description,
    require_same_teacher,
    text_hashes,
    what_differs,
)
from distill.teachers.backends.stored.settings import CacheOptions, default_tail
from distill.teachers.backends.stored.store import Fills, Store
from distill.teachers.backends.stored.teacher import StoredTeacher
from distill.teachers.base import InnerPlan, Teacher, TeacherPlan
from distill.teachers.calibration import cut_identity
from distill.teachers.footprint import Footprint, FootprintContext
from distill.teachers.identity import teacher_identity
from distill.teachers.load_context import CutRequest, LoadContext
from distill.teachers.vocabulary import Vocabulary


class StoredPlan(TeacherPlan):
    """The plan of a teacher by its store.

    Args:
        recipe, section, field: As of `TeacherPlan`. The section names the folder: `online_cache` where it is filled,
            `path` where it is only read.
        inner: Plan of the teacher that fills it; None for a store that is only read.
        writes: False to store nothing in a folder that is filled: outputs are dropped with their batch.

    Attributes:
        read_only: True if nothing is stored, and no teacher opened.
        folder: Folder of the store; None for none: of `teacher.top_k` alone, and as doctor uses it.
        required: Number of positions to store of every document of the data, by its key; empty until the data are read.
        noted: Rows of these documents; None until the data are read.
        chosen: Settings of what is stored, where a command decides; None for the recipe's.
        option: Option of the command that names the folder; None for the recipe's `online_cache`.
    """

    def __init__(
        self,
        recipe: Recipe,
        section: TeacherConfig | None = None,
        field: str = "teacher",
        inner: TeacherPlan | None = None,
        *,
        writes: bool = True,
    ) -> None:
        super().__init__(recipe, section, field)
        self.inner = inner
        self.read_only = inner is None
        self.shardable = inner is not None and inner.shardable
        self.folder: Path | None = None
        if inner is None:
            self.folder = Path(self._path).expanduser()
        else:
            self.sections = inner.sections
            if self.section.store is not None and writes:
                self.folder = Path(self.section.store).expanduser()
        self.required: dict[bytes, int] = {}
        self.noted: Splits | None = None
        self.chosen: CacheOptions | None = None
        self.option: str | None = None
        self._dtype: torch.dtype | None = None

    @property
    def _path(self) -> str:
        assert isinstance(self.section, StoredTeacherConfig)
        return self.section.path

    def parts(self) -> list[InnerPlan]:
        return [] if self.inner is None else [InnerPlan(self.inner, lambda splits: splits)]

    @property
    def plan(self) -> Plan | None:
        """Plan of what is stored; None where nothing is, or a cache is not complete that is only read."""
        if self.folder is None:
            return None
        return read_store_json(self.folder / (MANIFEST if self.read_only else PLAN))

    @property
    def names_model(self) -> bool:
        return self.section.model is not None or self.section.init == "random"

    def is_to_be_made(self) -> bool:
        """Return whether a cache that is only read does not exist, and the recipe names the model that will make it."""
        return self.read_only and self.names_model and not (self._folder() / MANIFEST).is_file()

    def _folder(self) -> Path:
        assert self.folder is not None, "this store has no folder"
        return self.folder

    # ------------------------------------------------------------ the model

    def config_section(self) -> ModelSection:
        if self.inner is not None:
            return self.inner.config_section()
        if self.is_to_be_made() or self.section.config is not None:
            return self.section.loaded()
        return ModelSection(init="random", config=stored_folder(self._folder(), TEACHER))

    def tokenizer_section(self) -> ModelSection:
        if self.inner is not None:
            return self.inner.tokenizer_section()
        if self.is_to_be_made():
            return self.section
        return ModelSection(model=stored_folder(self._folder(), TOKENIZER))

    def vocabulary(self) -> Vocabulary:
        """Return the teacher's vocabulary, whose rows are noted as they are read where a store is filled; random ids as
        when it was begun. Of a cache it is that of its tokenizer, which makes the data: they must be the cached ones.
        """
        begun = self.plan or {}
        if self.inner is None:
            section = self.section if self.recipe.data.is_synthetic else self.tokenizer_section()
            return Vocabulary(self.recipe, section, begun.get("ids_below"), top_k=begun.get("kind") == "top_k")

        def read(data: Data, seed: int) -> Splits:
            splits = load_data(data, vocabulary.tokenizer, seed=seed, vocab_size=vocabulary.id_bound)
            self.note_data(splits)
            return splits

        inner = self.inner.vocabulary()
        vocabulary = inner.with_reader(read, begun.get("ids_below"), top_k=not self.settings().hidden)
        return vocabulary

    def maker(self) -> dict[str, object] | None:
        if self.inner is not None:
            return self.inner.maker()
        return teacher_identity(self.section) if self.names_model else None

    def title(self) -> str:
        if self.inner is not None:
            return self.inner.title()
        made_by = (self.plan or {}).get("teacher", {})
        name = self.section.model or made_by.get("model") or made_by.get("config")
        return f"{name or f'the cache {self._path}'} (cached)"

    # ------------------------------------------------------------ what is stored

    @property
    def sent_top_k(self) -> bool:
        """True where servers send K tokens, which are stored as received."""
        return bool(self.section.urls) and self.section.top_tokens is not None

    def settings(self) -> CacheOptions:
        """Return what the recipe stores; hidden states in their own dtype, which is known once the teacher is open."""
        if self.chosen is not None and not self.sent_top_k:
            return self.chosen
        section = self.section
        hidden = section.store_format != "top_k" and section.top_tokens is None
        dtype = {"hidden_fp8": "fp8", "top_k": "float16"}.get(section.store_format)
        if self.folder is None and not hidden:  # nothing is written, and a drawn token would depend on the batch
            return CacheOptions(section.top_tokens or 64, dtype="float32")
        return CacheOptions(section.top_tokens or 64, hidden, default_tail(self.recipe.loss), dtype)

    def measure(self) -> DivergenceUnit:
        plan = self.plan
        if plan is not None:
            return cache_measure(plan)
        if self.inner is None:
            return DivergenceUnit("KL over what is cached")
        if self.sent_top_k:
            return self.inner.measure()
        settings = self.settings()
        kind = "hidden" if settings.hidden else "top_k"
        temperature = self.recipe.loss.temperatures.teacher
        return cache_measure({"kind": kind, "k": settings.k, "tail": settings.tail, "temperature": temperature})

    def copy_cached_state(self, other: TeacherPlan) -> None:
        if not isinstance(other, StoredPlan) or self.inner is None or other.inner is None:
            return
        self.inner.copy_cached_state(other.inner)
        if self.recipe.data == other.recipe.data:
            self.required = other.required
            self.noted = other.noted

    def note_data(self, splits: Splits) -> None:
        if self.inner is None:
            return
        rows = (row for split in (splits.train, *splits.held_out.values()) for row in rows_of(split))
        self.required = {d.key: len(d.predicting) for row in rows for d in stored_documents(row)}
        self.noted = splits

    def missing(self) -> list[bytes]:
        plan = self.plan
        return list(self.required) if plan is None else self._opened(plan).missing

    def _opened(self, plan: Plan) -> Store:
        """Return the store as it is on disk, with the parts of all processes."""
        return Store(self.folder, Fills(plan, self.required, all_parts=True))

    def data_problems(self, splits: Splits) -> list[str]:
        """Return the documents that a cache lacks; of a store that is filled, the teacher's problems, and one where the
        disk is too small for the data that were noted last.
        """
        if self.inner is not None:
            return [*self.inner.data_problems(splits), *self.room_problems()]
        try:
            store = Store(self._folder())
            hint = what_differs(store.manifest["data"], data_settings(self.recipe, splits.report.digest))
            store.require(splits.train, "training data", hint)
            for rows in splits.held_out.values():
                store.require(rows, "held-out data", hint)
        except ValueError as error:
            return [str(error)]
        return []

    def loss_problems(self) -> list[str]:
        """Return why K tokens that are stored do not allow the recipe's loss, in the words of the run."""
        plan = self.plan
        if plan is None or plan["kind"] != "top_k":
            return super().loss_problems()
        stored = TopKFormat(plan)
        try:
            for loss in self.recipe.loss.at_points:
                stored.loss(loss, VocabularyAlignment(LogitTransform(), stored.columns, None))
        except ValueError as error:
            return [str(error)]
        return []

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
        shards. Where all outputs for these data are stored, it is that of what is read alone: no teacher is opened.
        """
        shape = self.shapes()[0]
        if self.inner is None:
            return stored_footprint(self.plan or CacheOptions().checked()._asdict(), shape)
        if self.required and not self.missing() and (plan := self.plan) is not None:
            return stored_footprint(plan, shape)
        opened = self.inner.footprint(context)
        self._dtype = context.precision.teacher
        head = shape.head * context.precision.teacher.itemsize if context.sharded else 0.0
        return opened._replace(weights=opened.weights + head, token_bytes=2 * opened.token_bytes)

    def size_text(self) -> str:
        """Return what is stored, in words; of a cache that is still to be made, what it will take; of a store that is
        filled, the teacher's size and the bytes on disk.
        """
        if self.inner is None:
            return self._cache_size_text()
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

    def _cache_size_text(self) -> str:
        folder = self._folder()
        if not self.is_to_be_made():
            manifest = manifest_of(folder)
            size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            return f"not loaded: {folder}, {size / GIB:,.2f} GiB on disk; {description(manifest)}"
        columns = self.shapes()[0].vocabulary
        each = bytes_a_token({"kind": "top_k", "k": CacheOptions().k, "vocabulary": columns, "dtype": "float16"})
        return (
            f"not loaded: {self._path}, which is still to be made: distill cache takes {each} bytes per trained "
            f"token (k = {CacheOptions().k}), {each * 1e8 / GIB:.1f} GiB for each 100 M"
        )

    def _width(self) -> int:
        assert self.inner is not None
        settings = self.settings()
        shape = self.shapes()[0]
        if self._dtype is None:
            self._dtype = resolve_precision(self.recipe, resolve_device(self.recipe.train)).teacher
        dtype = settings.dtype or self.inner.stored_dtype() or str(self._dtype).removeprefix("torch.")
        kind = {"kind": "hidden" if settings.hidden else "top_k", "dtype": dtype, "k": settings.k}
        return bytes_a_token({**kind, "hidden": shape.hidden, "vocabulary": shape.vocabulary})

    # ------------------------------------------------------------ opening

    def open(self, context: LoadContext, vocabulary: Vocabulary) -> StoredTeacher:
        """Open what is stored, and the teacher inside where anything is missing.

        Raises:
            ValueError: with the first difference between folder and recipe: another teacher, tokenizer, template or
                setting of what is stored; a cache that is not complete or damaged; a folder of something else.
        """
        if self.inner is None:
            store = Store(self._folder())
            require_same_teacher(self.maker(), self.recipe, vocabulary.tokenizer, store.manifest, self._folder())
            return StoredTeacher(store, device=context.device)
        self._dtype = context.precision.teacher
        if self.folder is not None and broadcast_from_rank0(lambda: self._is_complete(vocabulary)):
            load = functools.partial(self.inner.open, context, vocabulary)
            return StoredTeacher(Store(self.folder), device=context.device, load=load)
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
        plan: Plan = self._new_plan(inner, vocabulary, head)
        folder = self.folder
        if folder is not None:

            def write_beside(begun: Plan) -> None:
                models = [*inner.models.values()]
                config = models[0].config if models else meta_config(self.config_section(), self.field)
                weights = head.weights if head is not None and begun["kind"] == "hidden" else None
                cut = None
                # a run that finds everything stored opens no teacher, so the student that is cut from it lies here
                student = self.recipe.student
                if student.is_cut and begun["student_layers"] is not None and not (folder / STUDENT).is_dir():
                    alone = context.calibration._replace(shares=False)  # this process begins for all
                    plain = student.model_copy(update={"lora": None})
                    request = CutRequest(plain, torch.device("cpu"), context.precision.student, alone)
                    cut = inner.cut_student(request).model
                write_companions(folder, config, vocabulary.teacher_tokenizer, weights, cut)

            plan = self._place_of(folder).begin(plan, write_beside, self.room_problems)
        store = Store(self.folder, Fills(plan, self.required, all_parts=self.option is not None))
        return StoredTeacher(store, inner, device=context.device, head=head)

    def _new_plan(self, inner: Teacher, vocabulary: Vocabulary, head: LogitHead | None) -> dict[str, Any]:
        """Return the plan of a store of this teacher's outputs.

        Without a head, servers send K tokens: they are stored as they come. With one, hidden states are stored and the
        head once beside them, or K tokens that are computed from both.
        """
        content: Mapping[str, object]
        dtype = None
        if head is None:
            assert self.inner is not None and isinstance(inner.format, TopKFormat)
            content = {**inner.format.manifest}
            sent = self.inner.stored_dtype()
            if sent is not None:
                content = {**content, "dtype": sent}
        else:
            dtype = str(head.weights.weight.dtype).removeprefix("torch.")
            settings = self.settings()
            settings = settings._replace(dtype=settings.dtype or dtype)
            rows = len(head.weights.weight)
            columns = rows if settings.hidden else self._columns(vocabulary, rows)
            content = hidden_content(settings, head, columns, self.recipe.loss.temperatures.teacher)
        student = self.recipe.student
        layers = None
        if student.is_cut:
            assert student.from_teacher is not None
            config = meta_config(self.config_section(), self.field)
            layers = cut_identity(student.from_teacher, layer_count(config))
        digest = "" if self.noted is None else self.noted.report.digest
        maker = {"dtype": self.section.held if self.section.dtype in LOW_BITS else dtype} | (self.maker() or {})
        plan = {
            "version": VERSION,
            **content,
            "seed": self.recipe.train.seed,
            "ids_below": vocabulary.id_bound,
            "teacher": maker,
            "text": text_hashes(self.recipe, vocabulary.teacher_tokenizer),
            "data": data_settings(self.recipe, digest),
            "student_layers": layers,
            "versions": environment(),
        }
        if self.option is None:
            plan["weights"] = None if inner.is_collective() else inner.fingerprint().get("weights")
        return plan

    def _place_of(self, folder: Path) -> StoreFolder:
        return StoreFolder(folder, self.place, of_command=self.option is not None)

    def _is_complete(self, vocabulary: Vocabulary) -> bool:
        """Return whether all is stored; then the cache is complete."""
        folder = self._folder()
        plan = self.plan
        if plan is None:
            self._place_of(folder).require_empty()
            return False
        require_same_teacher(self.maker(), self.recipe, vocabulary.teacher_tokenizer, plan, folder)
        settings = self.settings()
        now = {"kind": "hidden" if settings.hidden else "top_k", "k": settings.k}
        self._place_of(folder).require_same(plan, now)
        store = self._opened(plan)
        if not self.required or store.missing or (store.is_hidden and not (folder / HEAD).is_file()):
            return False
        # a run that was killed after its last document has not written the manifest: with it, nothing is opened now
        if store.writes:
            store.complete()
        return (folder / MANIFEST).is_file()

    def _columns(self, vocabulary: Vocabulary, rows: int) -> int:
        """Return the columns that K tokens are taken from: those that the recipe's student has too."""
        student = self.recipe.student.model_copy(update={"lora": None})
        if student.vocabulary == "cross":
            return rows
        own = meta_student(student, meta_config(self.config_section(), self.field)).shape.vocabulary
        if student.vocabulary == "extend" and vocabulary.tokenizer is not None:
            return min(rows, max(own, len(vocabulary.tokenizer)))
        return min(rows, shared_columns(vocabulary.tokenizer, vocabulary.student_tokenizer, rows, own)[0])


def stored_footprint(stored: Plan, shape: ModelSizes) -> Footprint:
    """Return the footprint of a plan's targets, of a model of this shape: its head, and what is stored per token."""
    number = DTYPES[stored["dtype"]].itemsize
    if stored.get("kind") == "hidden":
        read = max(number, 2)
        return Footprint(float(shape.head * read), token_bytes=(number + read) * shape.hidden, flops=head_flops(shape))
    # ids in int32; at their positions in fp32
    return Footprint(token_bytes=stored["k"] * ((4 + number) + (4 + 4)), logits=False)
