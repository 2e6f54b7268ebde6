"""The teacher of a complete cache: its weights are not loaded, and all that it needs is in the folder."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from distill.core.units import GIB
from distill.data.load import Splits
from distill.models.flops import head_flops
from distill.models.head import HeadWeights, LogitTransform
from distill.models.loading import load_student
from distill.models.shape import Shape
from distill.objectives.hidden import HiddenFormat, StoredHead
from distill.objectives.measure import Measure, cache_measure
from distill.objectives.targets import TargetFormat
from distill.objectives.top_k import TopKFormat
from distill.recipe import (
    FromTeacher,
    Generate,
    LoadedTeacherConfig,
    LocalTeacherConfig,
    ModelSection,
    Recipe,
    StoredTeacherConfig,
)
from distill.teachers.backends.stored.format import (
    DTYPES,
    HEAD,
    MANIFEST,
    STUDENT,
    TEACHER,
    TOKENIZER,
    Plan,
    bytes_a_token,
    manifest_of,
    read_json,
    stored_folder,
)
from distill.teachers.backends.stored.identity import description, fingerprint_of, require_same_teacher
from distill.teachers.backends.stored.read import TeacherCache
from distill.teachers.backends.stored.settings import Settings
from distill.teachers.backends.stored.teacher import CachedTeacher
from distill.teachers.base import AcceptedRows, Constructor, Prompt, Teacher, TeacherPlan
from distill.teachers.calibration import cut_identity
from distill.teachers.footprint import Footprint, FootprintContext
from distill.teachers.identity import teacher_identity
from distill.teachers.load_context import CutRequest, CutStudent, LoadContext
from distill.teachers.vocabulary import Vocabulary

log = logging.getLogger(__name__)


class ArchivedTeacher(CachedTeacher):
    """The teacher of a complete cache, by what the folder holds of it: all outputs are read, none is computed.

    Args:
        cache: A complete cache.
        device: Device of the stored head.
        load: Function that opens the teacher, to cut a student that is not stored; None for a recipe without one.
    """

    rows = AcceptedRows(supports_new_rows=False, whole_documents=True)

    def __init__(
        self, cache: TeacherCache, device: torch.device | str = "cpu", load: Callable[[], Teacher] | None = None
    ) -> None:
        super().__init__(cache, torch.device(device), torch.float32)
        self.cache = cache
        self.load = load
        manifest = cache.manifest
        self.format: TargetFormat
        if not cache.is_hidden:
            self.format = TopKFormat(manifest)
            return
        tensors = load_file(cache.path / HEAD, device=str(device))
        weights = HeadWeights(tensors["weight"], tensors.get("bias"), None)
        self.dtype = weights.weight.dtype
        self.stored_head = StoredHead(weights, "the head in the teacher's cache")
        self.format = HiddenFormat(self.stored_head, LogitTransform(manifest["scale"], manifest["softcap"]))

    def __deepcopy__(self, memo: dict[int, object]) -> ArchivedTeacher:
        """Return a copy with a head and reads of its own, over the same files."""
        twin = self.truncated_copy([])
        twin.stored_head = copy.deepcopy(self.stored_head, memo)
        twin.format = copy.deepcopy(self.format, memo)  # whose head is the copied one
        return twin

    def truncated_copy(self, layers: Sequence[int]) -> ArchivedTeacher:
        twin = copy.copy(self)
        twin._begin_reading()
        return twin

    def constructor(self) -> Constructor:
        return teacher_of_cache, (str(self.cache.path.absolute()),)

    def size_text(self) -> str:
        return description(self.cache.manifest)

    def cut_student(self, request: CutRequest) -> CutStudent:
        """Return the student that is stored; one of other layers is cut from the teacher, which is loaded for that."""
        section = request.section
        assert section.from_teacher is not None
        try:
            indices = stored_layer_indices(section.from_teacher, self.cache)
        except ValueError:
            if self.load is None:
                raise
            return self.load().cut_student(request)
        stored = section.model_copy(update={"from_teacher": None, "model": str(self.cache.path / STUDENT)})
        return CutStudent(load_student(stored, device=request.device, dtype=request.dtype), indices)

    def respond(self, prompts: Sequence[Prompt], settings: Generate) -> list[str] | None:
        return self.cache.answers(prompts, settings)

    def fingerprint(self) -> dict[str, object]:
        """Return the hash of the manifest, which has teacher, documents, and size and checksums of every shard; where
        the recipe names the teacher, that of the teacher, which is the same while the folder is filled.
        """
        if self.load is not None:
            return fingerprint_of(self.cache.manifest)
        return {"cache_sha256": hashlib.sha256((self.cache.path / MANIFEST).read_bytes()).hexdigest()}


def stored_layer_indices(cut: FromTeacher, cache: TeacherCache) -> list[int] | None:
    """Return the layers of the student that is stored in the cache, which must be those of the recipe; None of one
    whose parts were chosen by the data.

    Raises:
        ValueError: it holds no student, or one of other layers.
    """
    there = cache.manifest["student_layers"]
    config = read_json(cache.path / TEACHER / "config.json") or {}
    total = int(config.get("num_hidden_layers") or config.get("n_layer") or 0)
    expected = cut_identity(cut, total)
    if there != expected:
        of = "layers " if isinstance(there, list) else ""
        has = "no student" if there is None else f"the student of {of}{there}"
        raise ValueError(
            f"student.from_teacher: a cached teacher has no weights to cut from; {cache.path} holds {has}, expected "
            f"{expected}. Cache with this student in the recipe, which stores it, or give student.model: the folder "
            "of one that is cut already"
        )
    return expected if isinstance(expected, list) else None


def stored_footprint(stored: Plan, shape: Shape) -> Footprint:
    """Return the footprint of a plan's targets, of a model of this shape: its head, and what is stored per token."""
    number = DTYPES[stored["dtype"]].itemsize
    if stored.get("kind") == "hidden":
        read = max(number, 2)
        return Footprint(float(shape.head * read), token_bytes=(number + read) * shape.hidden, flops=head_flops(shape))
    # ids in int32; at their positions in fp32
    return Footprint(token_bytes=stored["k"] * ((4 + number) + (4 + 4)), logits=False)


class ArchivedPlan(TeacherPlan):
    """The plan of the teacher that made the cache at `teacher.path`, or that is named there to make it."""

    shardable = False
    section: StoredTeacherConfig

    def __init__(self, recipe: Recipe, section: StoredTeacherConfig | None = None, field: str = "teacher") -> None:
        super().__init__(recipe, section, field)
        self.folder = Path(self.section.path).expanduser()
        self.names_model = self.section.model is not None or self.section.init == "random"

    @property
    def manifest(self) -> Plan | None:
        """Manifest of a complete cache; None where there is none yet."""
        return read_json(self.folder / MANIFEST)

    def is_to_be_made(self) -> bool:
        """Return whether the recipe names the model that will make the cache, and the cache does not exist."""
        return self.names_model and not (self.folder / MANIFEST).is_file()

    def config_section(self) -> ModelSection:
        """Return the configuration that the recipe names, else the one in the cache."""
        if self.is_to_be_made() or self.section.config is not None:
            return self.section.loaded()
        return ModelSection(init="random", config=stored_folder(self.folder, TEACHER))

    def tokenizer_section(self) -> ModelSection:
        if self.is_to_be_made():
            return self.section
        return ModelSection(model=stored_folder(self.folder, TOKENIZER))

    def vocabulary(self) -> Vocabulary:
        """Return the vocabulary of the cache's tokenizer, which makes the data; they must be the cached ones."""
        plan = self.manifest or {}
        section = self.section if self.recipe.data.is_synthetic else self.tokenizer_section()
        return Vocabulary(self.recipe, section, plan.get("ids_below"), top_k=plan.get("kind") == "top_k")

    def measure(self) -> Measure:
        return Measure("KL over what is cached") if (plan := self.manifest) is None else cache_measure(plan)

    def data_problems(self, splits: Splits) -> list[str]:
        try:
            TeacherCache(self.folder).require_data(self.recipe, splits)
        except ValueError as error:
            return [str(error)]
        return []

    def footprint(self, context: FootprintContext) -> Footprint:
        """Return the footprint of what is stored per token, or will be by default."""
        return stored_footprint(self.manifest or Settings().checked()._asdict(), self.shapes()[0])

    def title(self) -> str:
        """Return the name of the model that made the cache; the cache's folder where that is not known."""
        maker = (self.manifest or {}).get("teacher", {})
        name = self.section.model or maker.get("model") or maker.get("config")
        return f"{name or f'the cache {self.section.path}'} (cached)"

    def size_text(self) -> str:
        """Return what is stored, in words; of a cache that is still to be made, what it will take."""
        if not self.is_to_be_made():
            manifest = manifest_of(self.folder)
            size = sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))
            return f"not loaded: {self.folder}, {size / GIB:,.2f} GiB on disk; {description(manifest)}"
        columns = self.shapes()[0].vocabulary
        each = bytes_a_token({"kind": "top_k", "k": Settings().k, "vocabulary": columns, "dtype": "float16"})
        return (
            f"not loaded: {self.section.path}, which is still to be made: distill cache takes {each} bytes per trained "
            f"token (k = {Settings().k}), {each * 1e8 / GIB:.1f} GiB for each 100 M"
        )

    def open(self, context: LoadContext, vocabulary: Vocabulary) -> ArchivedTeacher:
        """Open the cache, and check that it fits the recipe.

        Raises:
            ValueError: with the first difference between the cache and the recipe.
        """
        cache = TeacherCache(self.folder)
        here = teacher_identity(self.section) if self.names_model else None
        require_same_teacher(here, self.recipe, vocabulary.tokenizer, cache.manifest, cache.path)
        return teacher_of_cache(cache, context.device)


def teacher_of_cache(
    cache: TeacherCache | str | Path, device: torch.device | str = "cpu", load: Callable[[], Teacher] | None = None
) -> ArchivedTeacher:
    """Return the teacher whose outputs are all in a cache, open or in a folder; no weights are loaded.

    Args:
        cache: Complete cache.
        device: Device of the stored head, and of this process.
        load: As of `ArchivedTeacher`.
    """
    return ArchivedTeacher(cache if isinstance(cache, TeacherCache) else TeacherCache(cache), device, load)


def section_to_load(recipe: Recipe) -> LoadedTeacherConfig:
    """Return the section of the recipe's teacher as one to load: for a cache, the model that makes it.

    Raises:
        ValueError: the section does not name that model.
    """
    section = recipe.teacher
    if isinstance(section, LoadedTeacherConfig):
        return section
    if section.model is None and section.init != "random":
        raise ValueError(
            f"teacher.model: expected the model to compute outputs with (type: {section.type}), got none; set it"
        )
    return section.loaded()


def maker_section(recipe: Recipe) -> LoadedTeacherConfig:
    """Return the section of the recipe's teacher as one to load: for a complete cache, the model that made it.

    Raises:
        ValueError: there is no complete cache.
    """
    section = recipe.teacher
    if not isinstance(section, StoredTeacherConfig):
        assert isinstance(section, LoadedTeacherConfig)
        return section
    folder = Path(section.path).expanduser()
    manifest = manifest_of(folder)
    named = {name: manifest["teacher"][name] for name in ("model", "revision", "adapter", "init", "config")}
    if section.model is not None:
        named = {"model": section.model, "revision": section.revision, "adapter": section.adapter}
    log.info("loading %s, the teacher of the cache %s, for its weights", named["model"] or named["config"], folder)
    rest = {name: getattr(section, name) for name in ("dtype", "attention", "trust_remote_code")}
    return LocalTeacherConfig(**named, **rest)
