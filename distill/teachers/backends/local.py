"""Local teacher backend: a model in this process, on the device, sharded, in 8 bits or in host memory.

Memory of the weights, in bytes: P parameters, D of them in the decoder's linear layers, b bytes per weight as loaded:

    resident       P b
    fp8, int8      D + (P - D) b                  linear layers except the LM head: one byte a weight
    quantised      D bits / 8 + (P - D) b         bits of the checkpoint; P b where they are unknown
    offloaded      (P - layers) b + 2 x (largest layer) b      on the device; the layers are in host memory

An fp8 teacher is loaded in 16 bits and then quantised, or layer by layer where it does not fit in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from distill.core import console
from distill.core.ranks import is_main_process
from distill.generation.greedy import generate
from distill.models.gpu_specs import has_fp8, runs_our_kernels
from distill.models.head import align_head, last_hidden, probe_logits
from distill.models.load.fingerprint import model_identity
from distill.models.load.loading import load_teacher
from distill.models.load.meta_models import MetaModel, meta_config, meta_model, meta_student
from distill.models.load.quantised import check_quantisation, is_quantised, method_of, quantisation_of
from distill.models.precision.fp8_teacher import find_skipped, load_a_layer_at_a_time, quantise
from distill.models.prune.pruning import cut_layers
from distill.models.shape import USABLE, Shape
from distill.objectives.hidden import HiddenFormat, ModelHead
from distill.objectives.targets import Batch, TargetFormat, Targets, VocabularyAlignment
from distill.recipe import Generate, Recipe
from distill.recipe import Teacher as TeacherSection
from distill.recipe.models import EIGHT_BITS
from distill.teachers.backends.sharded import load_sharded_teacher
from distill.teachers.calibration import CutRequest, CutStudent, cut_from
from distill.teachers.capabilities import (
    ChecksFirstBatch,
    CopiesTruncated,
    CutsStudents,
    Prompt,
    Quantises,
    Responds,
    is_collective,
)
from distill.teachers.footprint import Footprint, FootprintContext, SmallerTeacher
from distill.teachers.fp8_cost import Offer, fp8_offers, quantise_and_measure
from distill.teachers.identity import model_name
from distill.teachers.interface import LoadContext, Teacher, TeacherSource
from distill.teachers.source_capabilities import OffersSmaller
from distill.teachers.vocabulary import Vocabulary

if TYPE_CHECKING:
    from distill.models.precision.dtypes import Precision


SHARDED_FP8 = "an fp8 teacher cannot be sharded, and it does not fit whole"


class LoadedTeacher(Teacher, ChecksFirstBatch, CopiesTruncated, CutsStudents, Quantises, Responds):
    """A causal language model, frozen and in eval mode.

    Args:
        model: Model of transformers, on its device; put in eval mode and frozen.
        field: Field of the recipe that configures it.
        tokenizer: Tokenizer for `respond`; None where the teacher does not generate.
        fp8: True if `quantise` quantises its linear layers to FP8.
        skip: Layers that stay in 16 bits, as `teacher.fp8_skip` names them.

    Attributes:
        hidden: Format of its hidden states; also the target format, unless a subclass has another.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        field: str = "teacher",
        tokenizer: Any = None,
        fp8: bool = False,
        skip: Sequence[str] = (),
    ) -> None:
        self.model: Any = model.eval().requires_grad_(False)
        self.models: Mapping[str, nn.Module] = {field: model}
        self.tokenizer, self.fp8, self.skip = tokenizer, fp8, skip
        align_head(model)
        self.hidden = HiddenFormat(ModelHead(model), probe_logits(model, field))
        self.format: TargetFormat = self.hidden

    def targets(self, batch: Batch) -> Targets:
        """Return the last hidden states, [B, S, hidden]."""
        return last_hidden(self.model, batch)

    def cut_student(self, request: CutRequest) -> CutStudent:
        return cut_from(self.model, request)

    def quantise(self) -> None:
        if self.fp8 and not is_quantised(self.model):
            quantise(self.model, self.skip)

    def validate_first_batch(self, batch: Batch, student: nn.Module | None, pairing: VocabularyAlignment) -> list[str]:
        if not self.fp8:
            return []
        if is_quantised(self.model):
            cost = "quantised while it was loaded, since it does not fit whole: the cost is not measured"
        else:
            cost = str(quantise_and_measure(self.model, self.hidden, batch, student, pairing, self.skip))
        return [f"{'fp8':<12}{cost}"]

    def fp8_offers(self, batch: Batch, timed: Callable[[Callable[[], object]], float] | None = None) -> list[Offer]:
        """Return the cost of keeping layers in 16 bits; empty for a teacher that was quantised while it was loaded."""
        return [] if is_quantised(self.model) else fp8_offers(self.model, self.hidden, batch, timed)

    def respond(self, prompts: Sequence[Prompt], settings: Generate) -> list[str] | None:
        if self.tokenizer is None or not (is_main_process() or is_collective(self)):
            return None
        return generate(self.model, self.tokenizer, prompts, settings.max_new_tokens)

    def truncated_copy(self, layers: Sequence[int]) -> LoadedTeacher:
        return LoadedTeacher(truncated(self.model, layers), field=next(iter(self.models)))

    def fingerprint(self) -> dict[str, object]:
        return model_identity(self.model)


def truncated(model: Any, layers: Sequence[int]) -> Any:
    """Return a copy of `model` with the given layers (negative: from the end), or with all where it has as few."""
    total = int(model.config.get_text_config().num_hidden_layers)
    indices = sorted({index % total for index in layers}) if total > len(layers) else list(range(total))
    return cut_layers(model, indices).to(model.device)


class ModelSource(TeacherSource, OffersSmaller):
    """Source of a local teacher: its recipe section, and its shape before any weight is loaded.

    Args:
        recipe: Recipe of the run.
        section: Section that configures the model; None for the recipe's `teacher`.
        field: Field of the recipe that holds the section.
    """

    def __init__(self, recipe: Recipe, section: TeacherSection | None = None, field: str = "teacher") -> None:
        self.recipe, self.section, self.field = recipe, section or recipe.teacher, field
        self.sections = {field: self.section}
        self.shardable = self.section.offload is None and self.section.dtype != "int8"

    def meta(self) -> MetaModel:
        """Return the model on the meta device, without memory."""
        return meta_model(meta_config(self.section, self.field), self.field)

    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.recipe, self.section)

    def problems(self, *, cuda: bool, sharded: bool, family: str | None = None) -> list[str]:
        """Return the settings that 8-bit weights, a quantised checkpoint or sharding do not support."""
        section, student, problems = self.section, self.recipe.student, []
        if section.dtype == "int8" and not cuda:
            problems.append("teacher.dtype: int8 needs a CUDA GPU; use bfloat16 or auto")
        if section.dtype == "fp8" and cuda and not has_fp8(family):
            instead = "teacher.offload: cpu" if section.init == "random" else "int8, or teacher.offload: cpu"
            problems.append(
                f"{self.field}.dtype: fp8 needs a GPU with FP8 tensor cores (Ada, Hopper, Blackwell); this one is "
                f"{family}: use {instead}"
            )
        if sharded and section.dtype == "fp8" and self.recipe.parallel.teacher == "sharded":
            problems.append(
                "teacher.dtype: fp8 cannot be sharded (parallel.teacher); use bfloat16, or parallel.teacher: copied"
            )
        elif sharded and section.dtype == "fp8":
            problems.append(f"teacher.dtype: {SHARDED_FP8}; use bfloat16")
        if sharded and student.is_cut:
            problems.append(
                "student.from_teacher: layers cannot be cut from a sharded teacher; set parallel.teacher to copied, or "
                "cut the student where the teacher fits and set student.model to it"
            )
        try:
            find_skipped(self.meta().model, section.fp8_skip)
        except ValueError as error:
            problems.append(str(error))
        if student.is_cut and student.from_teacher is not None and student.from_teacher.cuts_widths:
            from distill.models.prune.importance import shape_for

            try:
                shape_for(student.from_teacher, self.meta().config)
            except ValueError as error:
                problems.append(str(error))
        if section.init == "random":
            return problems
        config = self.meta().config
        try:
            check_quantisation(config, section, self.field)
        except ValueError as error:
            problems.append(str(error))
        stored = quantisation_of(config)
        if stored is not None and section.offload is not None:
            method = method_of(stored)
            problems.append(f"teacher.offload: cpu needs weights in floating point; the teacher's are {method}")
        if stored is not None and student.is_cut:
            problems.append(
                f"student.from_teacher: the teacher is quantised ({method_of(stored)}), whose layers cannot be "
                "cut; set student.model to a student that is cut already"
            )
        if student.has_tokenizer:
            try:
                check_quantisation(meta_student(student, config).config, student, "student")
            except ValueError as error:
                problems.append(str(error))
        return problems

    def footprint(self, context: FootprintContext) -> Footprint:
        """Return the footprint by the formulas at the head of this file."""
        precision, shape = context.precision, self.meta().shape
        size = precision.teacher.itemsize
        layers = float(shape.layered * size) if self.section.offload is not None else 0.0
        in_16_bits = find_skipped(self.meta().model, self.section.fp8_skip).weights  # the others are in fp8
        whole = loading_bytes(self, precision) if self.section.dtype == "fp8" else 0.0
        return Footprint(
            weights=placed_bytes(self.section, shape, precision) + in_16_bits * (size - 1),
            gathered=max(2 * shape.linear / shape.layers, shape.head) * size if context.sharded else 0.0,
            host=layers,
            moved=layers,
            loading=whole if whole <= USABLE * context.memory_bytes else 0.0,  # otherwise it is loaded layer by layer
            token_bytes=size * shape.hidden,
            flops=self.meta().flops,
        )

    def smaller(self, family: str | None = None) -> list[SmallerTeacher]:
        """Return variants with less memory, in 8 bits and offloaded; empty where it is one of these already."""
        recipe, section = self.recipe, self.section
        if section.offload is not None or section.dtype in EIGHT_BITS:
            return []
        bits = "fp8" if has_fp8(family) else "int8"
        in_8_bits = recipe.model_copy(update={"teacher": section.model_copy(update={"dtype": bits})})
        effect = "changes the teacher's outputs slightly" + (": the run prints by how much" if bits == "fp8" else "")
        copied = recipe.parallel.model_copy(update={"teacher": "copied"})
        offloaded = section.model_copy(update={"offload": "cpu"})
        offload = SmallerTeacher(
            "teacher.offload=cpu",
            recipe.model_copy(update={"teacher": offloaded, "parallel": copied}),
            "teacher.offload to cpu, all but two of the teacher's layers, which cross the bus instead",
            "its layers cross the bus in every micro-batch",
            same_targets=True,
        )
        if bits == "int8" and section.init == "random":  # bitsandbytes quantises files as it reads them
            return [offload]
        saved = f"teacher.dtype to {bits}, half of the teacher's layers"
        return [SmallerTeacher(f"teacher.dtype={bits}", in_8_bits, saved, effect), offload]

    def title(self) -> str:
        return model_name(self.section)

    def open(self, context: LoadContext, vocabulary: Vocabulary) -> LoadedTeacher:
        section, tokenizer = self.section, vocabulary.teacher_tokenizer
        fp8 = section.dtype == "fp8"
        return LoadedTeacher(self.load(context), field=self.field, tokenizer=tokenizer, fp8=fp8, skip=section.fp8_skip)

    def load(self, context: LoadContext) -> Any:
        """Load the model as its section and the placement require; a sharded model is patched before it is sharded."""
        device, dtype = context.device, context.precision.teacher
        if context.placement.teacher_sharded:
            model, report = load_sharded_teacher(
                self.section,
                device=device,
                dtype=dtype,
                attention=(lambda model: context.attention.of(model, "teacher")) if runs_our_kernels(device) else None,
            )
            if report is not None and is_main_process():
                console.print_lines(f"{'kernels':<12}teacher: {report}")
            return model
        if self.section.dtype == "fp8" and device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            if loading_bytes(self, context.precision) > USABLE * total:
                return load_a_layer_at_a_time(self.section, device=device, dtype=dtype)
        return load_teacher(self.section, device=device, dtype=dtype)


def loading_bytes(source: ModelSource, precision: Precision) -> float:
    """Return the bytes of teacher and student at loading, before the teacher is quantised."""
    meta = source.meta()
    student = meta_student(source.recipe.student, meta.config).shape
    adapters = student.trained if student.rank else 0
    weights = (student.parameters - adapters) * precision.student.itemsize + 4 * adapters
    return float(meta.shape.parameters * precision.teacher.itemsize + weights)


def placed_bytes(section: TeacherSection, shape: Shape, precision: Precision) -> float:
    """Return the bytes of an unsharded teacher's weights on its device; offloaded layers are not counted."""
    size = precision.teacher.itemsize
    if section.offload is not None:
        return float(shape.parameters - shape.layered + 2 * shape.largest_layer) * size
    bits = 8.0 if section.dtype in EIGHT_BITS else shape.stored_bits
    saved = 0.0 if bits is None else shape.linear * (size - bits / 8)
    return shape.parameters * size - saved
