"""An offline teacher: its outputs are read from a cache, and no weights are loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from distill.core.units import GIB
from distill.data.load import Splits
from distill.models.flops import head_flops
from distill.models.head import HeadWeights, LogitTransform
from distill.models.load.loading import load_student
from distill.models.shape import Shape
from distill.objectives.hidden import HiddenFormat, StoredHead
from distill.objectives.measure import Measure, cache_measure
from distill.objectives.targets import Batch, TargetFormat
from distill.objectives.top_k import TopKFormat, TopKTargets, spread, top_k_targets
from distill.objectives.top_k_encoding import unpack_hidden
from distill.recipe import FromTeacher, Generate, ModelSection, Recipe
from distill.recipe import Teacher as TeacherSection
from distill.teachers.backends.stored.format import (
    DTYPES,
    HEAD,
    MANIFEST,
    STUDENT,
    TEACHER,
    TOKENIZER,
    Plan,
    bytes_a_token,
    maker_of,
    manifest_of,
    read_json,
    stored_folder,
)
from distill.teachers.backends.stored.identity import description, require_same_teacher
from distill.teachers.backends.stored.read import PREFIX, CachedRows, TeacherCache
from distill.teachers.backends.stored.settings import Settings
from distill.teachers.calibration import CutRequest, CutStudent, cut_identity
from distill.teachers.capabilities import CutsStudents, DescribesSize, HoldsHead, Prompt, Responds
from distill.teachers.footprint import Footprint, FootprintContext
from distill.teachers.identity import teacher_identity
from distill.teachers.interface import AcceptedRows, Collate, LoadContext, Teacher, TeacherSource
from distill.teachers.source_capabilities import (
    ChecksData,
    DescribesStored,
    MadeByCommand,
    Measures,
    NamesFiles,
    shapes_of,
)
from distill.teachers.vocabulary import Vocabulary, is_synthetic


class CachedTeacher(Teacher, CutsStudents, DescribesSize, HoldsHead, Responds):
    """A teacher whose outputs are read from disk, in place of running it.

    Args:
        cache: open, or its folder.
        device: where the stored head is held.
    """

    rows = AcceptedRows(supports_new_rows=False, whole_documents=True)

    def __init__(self, cache: TeacherCache | str | Path, device: torch.device | str = "cpu") -> None:
        self.cache = cache if isinstance(cache, TeacherCache) else TeacherCache(cache)
        self.models = {}
        manifest = self.cache.manifest
        self.format: TargetFormat
        if self.cache.is_hidden:
            tensors = load_file(self.cache.path / HEAD, device=str(device))
            head = StoredHead(
                HeadWeights(tensors["weight"], tensors.get("bias"), None), "the head in the teacher's cache"
            )
            self.format = HiddenFormat(head, LogitTransform(manifest["scale"], manifest["softcap"]))
            self.stored_head: StoredHead | None = head
        else:
            self.stored_head, self.format = None, TopKFormat(manifest)

    def collate(self, plain: Collate) -> Collate:
        return CachedRows(plain, self.cache)

    def student_batch(self, batch: Batch, needs_targets: bool) -> dict[str, torch.Tensor]:
        if needs_targets and not any(name.startswith(PREFIX) for name in batch):
            raise ValueError("batch: expected the cache's targets in it; batches come from objective.collator(...)")
        return {name: value for name, value in batch.items() if not name.startswith(PREFIX)}

    def targets(self, batch: Batch) -> torch.Tensor | TopKTargets:
        """Return the stored targets at their positions; 0 where no token is trained."""
        dtype = torch.float32 if self.stored_head is None else self.stored_head.weights.weight.dtype
        return targets_of(self.cache.manifest, batch, dtype)

    def size_text(self) -> str:
        return description(self.cache.manifest)

    def cut_student(self, request: CutRequest) -> CutStudent:
        """Return the student that is stored in the cache."""
        section = request.section
        assert section.from_teacher is not None
        indices = stored_layer_indices(section.from_teacher, self.cache)
        stored = section.model_copy(update={"from_teacher": None, "model": str(self.cache.path / STUDENT)})
        return CutStudent(load_student(stored, device=request.device, dtype=request.dtype), indices)

    def respond(self, prompts: Sequence[Prompt], settings: Generate) -> list[str] | None:
        return self.cache.answers(prompts, settings)

    def fingerprint(self) -> dict[str, object]:
        """Return the hash of the manifest, which has teacher, documents, and size and checksums of every shard."""
        return {"cache_sha256": hashlib.sha256((self.cache.path / MANIFEST).read_bytes()).hexdigest()}


def targets_of(plan: Plan, batch: Batch, dtype: torch.dtype) -> torch.Tensor | TopKTargets:
    """Return the stored targets of a batch at their positions; 0 where no token is trained.

    Args:
        plan: of the cache.
        batch: collated, with the stored tensors.
        dtype: of hidden states.
    """
    shape, rows = batch["input_ids"].shape, batch["valid_rows"]
    stored = {name.removeprefix(PREFIX): value for name, value in batch.items() if name.startswith(PREFIX)}
    if plan["kind"] == "hidden":
        return spread(unpack_hidden(stored["hidden"], stored.get("hidden_scale"), dtype), rows, shape)
    return top_k_targets(stored, rows, shape, plan["tail"])


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


class CacheSource(TeacherSource, NamesFiles, MadeByCommand, Measures, ChecksData, DescribesStored):
    """The source of the cache at `teacher.path`, complete or still to be made by the model that the recipe names."""

    shardable = False

    def __init__(self, recipe: Recipe, section: TeacherSection | None = None, field: str = "teacher") -> None:
        self.recipe, self.section, self.field, self.sections = recipe, section or recipe.teacher, field, {}
        self.folder = Path(self.section.path or "").expanduser()

    @property
    def manifest(self) -> Plan | None:
        """Manifest of a complete cache; None where there is none yet."""
        return read_json(self.folder / MANIFEST)

    def is_to_be_made(self) -> bool:
        """Return whether the recipe names the model that will make the cache, and the cache does not exist."""
        named = self.section.model is not None or self.section.init == "random"
        return named and not (self.folder / MANIFEST).is_file()

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
        manifest = self.manifest or {}
        section = self.section if is_synthetic(self.recipe.data) else self.tokenizer_section()
        top_k = bool(manifest) and manifest.get("kind") != "hidden"
        return Vocabulary(self.recipe, section, manifest.get("ids_below"), top_k)

    def measure(self) -> Measure:
        manifest = self.manifest
        return Measure("KL over what is cached") if manifest is None else cache_measure(manifest)

    def data_problems(self, splits: Splits) -> list[str]:
        try:
            TeacherCache(self.folder).require_data(self.recipe, splits)
        except ValueError as error:
            return [str(error)]
        return []

    def footprint(self, context: FootprintContext) -> Footprint:
        """Return the footprint of what is stored per token, or will be by default."""
        return stored_footprint(self.manifest or Settings().checked()._asdict(), shapes_of(self)[0])

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
        columns = shapes_of(self)[0].vocabulary
        each = bytes_a_token({"kind": "top_k", "k": Settings().k, "vocabulary": columns, "dtype": "float16"})
        return (
            f"not loaded: {self.section.path}, which is still to be made: distill cache takes {each} bytes per trained "
            f"token (k = {Settings().k}), {each * 1e8 / GIB:.1f} GiB for each 100 M"
        )

    def open(self, context: LoadContext, vocabulary: Vocabulary) -> CachedTeacher:
        """Open the cache, and check that it fits the recipe.

        Raises:
            ValueError: with the first difference between the cache and the recipe.
        """
        cache = TeacherCache(self.folder)
        named = self.section.model is not None or self.section.init == "random"
        here = teacher_identity(self.section) if named else None
        require_same_teacher(here, self.recipe, vocabulary.tokenizer, cache.manifest, cache.path)
        return CachedTeacher(cache, context.device)


def section_to_load(recipe: Recipe) -> TeacherSection:
    """Return the section of the recipe's teacher as one to load: for a cache, the model that makes it.

    Raises:
        ValueError: the section does not name that model.
    """
    section = recipe.teacher
    if section.is_loaded:
        return section
    if section.model is None and section.init != "random":
        raise ValueError(
            f"teacher.model: expected the teacher to run over the data beside type: {section.type}, got none"
        )
    return section.loaded()


def maker_section(recipe: Recipe) -> TeacherSection:
    """Return the section of the recipe's teacher as one to load: for a complete cache, the model that made it.

    Raises:
        ValueError: there is no complete cache.
    """
    return maker_of(recipe.teacher) if recipe.teacher.is_cached else recipe.teacher
