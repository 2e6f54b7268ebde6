"""Local teacher backend: a model in this process, on the device, sharded, in 8 bits or in host memory."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from distill.core import console
from distill.core.ranks import is_main_process
from distill.generation.engines import greedy_responses
from distill.generation.option_scores import OptionScorer
from distill.generation.tasks import BATCH, TaskQuestions
from distill.models.dtypes import Precision
from distill.models.fp8_teacher import find_skipped, load_a_layer_at_a_time
from distill.models.gpu_specs import has_fp8, runs_our_kernels
from distill.models.head import align_head, find_head, last_hidden, probe_logits
from distill.models.load.fingerprint import model_identity
from distill.models.load.shared_weights import FrozenWeights, frozen_weights
from distill.models.loading import load_teacher, teacher_seed
from distill.models.meta_models import MetaModel, meta_config, meta_model
from distill.models.prune.importance import shape_for
from distill.models.prune.pruning import cut_layers
from distill.models.quantised_checkpoints import check_quantisation, method_of, quantisation_of
from distill.models.shape import USABLE
from distill.objectives.hidden import HiddenFormat, ModelHead
from distill.objectives.targets import Batch, TargetFormat, Targets
from distill.recipe import Generate, LoadedTeacherConfig, Recipe
from distill.recipe.models import EIGHT_BITS
from distill.teachers.backends.local_memory import loading_bytes, model_footprint, smaller_variants
from distill.teachers.backends.sharded import load_sharded_teacher
from distill.teachers.base import Constructor, Prompt, Teacher, TeacherPlan
from distill.teachers.calibration import cut_from
from distill.teachers.load_context import CutRequest, CutStudent, LoadContext
from distill.teachers.vocabulary import Vocabulary

if TYPE_CHECKING:
    from distill.teachers.footprint import Footprint, FootprintContext, SmallerTeacher

SHARDED_FP8 = "an fp8 teacher cannot be sharded, and it does not fit whole"


class LoadedTeacher(Teacher):
    """A causal language model, frozen and in eval mode.

    Args:
        model: Model of transformers, on its device; put in eval mode and frozen.
        tokenizer: Tokenizer for `respond`; None where the teacher does not generate.

    Attributes:
        hidden: Format of its hidden states; also the target format, unless a subclass has another.
    """

    def __init__(self, model: nn.Module, *, field: str = "teacher", tokenizer: Any = None) -> None:
        self.model: Any = model.eval().requires_grad_(False)
        self.models: Mapping[str, nn.Module] = {field: model}
        self.tokenizer = tokenizer
        align_head(model)
        if find_head(model).owner is not find_head(model).linear:
            # the losses read the head's own weight: the adapter would be left out without a word
            raise ValueError(f"{field}: expected a head without adapters; merge them, or leave the head out of them")
        self.hidden = HiddenFormat(ModelHead(model), probe_logits(model, field))
        self.format: TargetFormat = self.hidden

    def targets(self, batch: Batch) -> Targets:
        """Return the last hidden states, [B, S, hidden]."""
        return last_hidden(self.model, batch)

    def cut_student(self, request: CutRequest) -> CutStudent:
        return cut_from(self.model, request)

    def respond(self, prompts: Sequence[Prompt], settings: Generate) -> list[str] | None:
        if self.tokenizer is None or not (is_main_process() or self.is_collective()):
            return None
        return greedy_responses(self.model, self.tokenizer, prompts, settings.max_new_tokens)

    def choose(self, questions: TaskQuestions) -> list[str] | None:
        if self.tokenizer is None or not (is_main_process() or self.is_collective()):
            return None
        scorer = OptionScorer(self.model, self.tokenizer, self.hidden.transform, BATCH)
        return questions.choose(scorer, range(len(questions.prompts)))

    def constructor(self) -> Constructor:
        return functools.partial(LoadedTeacher, field=next(iter(self.models))), (self.model,)

    def truncated_copy(self, layers: Sequence[int]) -> LoadedTeacher:
        return LoadedTeacher(truncated(self.model, layers), field=next(iter(self.models)))

    def fingerprint(self) -> dict[str, object]:
        return model_identity(self.model)


def truncated(model: Any, layers: Sequence[int]) -> Any:
    """Return a copy of `model` with the given layers (negative: from the end), or with all where it has as few."""
    total = int(model.config.get_text_config().num_hidden_layers)
    indices = sorted({index % total for index in layers}) if total > len(layers) else list(range(total))
    return cut_layers(model, indices).to(model.device)


class LocalPlan(TeacherPlan):
    """Plan of a local teacher: its recipe section, and its shape before any weight is loaded.

    Args:
        section: Section that configures the model; None for the recipe's `teacher`.
        field: Field of the recipe that holds the section.
    """

    section: LoadedTeacherConfig

    def __init__(self, recipe: Recipe, section: LoadedTeacherConfig | None = None, field: str = "teacher") -> None:
        super().__init__(recipe, section, field)
        self.sections = {field: self.section}
        self.shardable = self.section.offload is None and self.section.dtype not in ("int8", "nf4")

    def meta(self) -> MetaModel:
        return meta_model(meta_config(self.section, self.field), self.field)

    def problems(self, *, cuda: bool, sharded: bool, family: str | None = None) -> list[str]:
        section = self.section
        student = self.recipe.student
        problems = []
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
        if sharded and not section.merge_adapter:
            problems.append(
                "teacher.merge_adapter: false needs a teacher that each process holds whole; merge the adapter, or set "
                "parallel.teacher to copied"
            )
        if student.is_cut and not section.merge_adapter:
            problems.append("student.from_teacher: layers are cut from merged weights; set teacher.merge_adapter: true")
        if section.fp8_skip:
            try:
                find_skipped(self.meta().model, section.fp8_skip)
            except ValueError as error:
                problems.append(str(error))
        if student.is_cut and student.from_teacher is not None and student.from_teacher.cuts_widths:
            try:
                shape_for(student.from_teacher, self.meta().config)
            except ValueError as error:
                problems.append(str(error))
        if section.init == "random":
            return problems
        config = meta_config(section, self.field)
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
                check_quantisation(meta_config(student, "student"), student, "student")
            except ValueError as error:
                problems.append(str(error))
        return problems

    def frozen_weights(self, precision: Precision, *, sharded: bool) -> list[FrozenWeights]:
        section = self.section
        unlike_files = ""
        if sharded:
            unlike_files = "the teacher is sharded (FSDP2)"
        elif section.dtype in EIGHT_BITS:
            unlike_files = f"{self.field}.dtype: {section.dtype}"
        elif section.offload is not None:
            unlike_files = f"{self.field}.offload: {section.offload}"
        elif section.adapter is not None and section.merge_adapter:
            unlike_files = f"{self.field}.adapter is merged into the teacher's weights ({self.field}.merge_adapter)"
        elif section.init == "pretrained" and quantisation_of(meta_config(section, self.field)) is not None:
            unlike_files = "the teacher's checkpoint is quantised"
        return [frozen_weights(section, self.field, precision.teacher, teacher_seed(section), unlike_files)]

    def footprint(self, context: FootprintContext) -> Footprint:
        return model_footprint(self, context)

    def smaller(self, family: str | None = None) -> list[SmallerTeacher]:
        return smaller_variants(self, family)

    def open(self, context: LoadContext, vocabulary: Vocabulary) -> LoadedTeacher:
        model = self.load(context)
        tokenizer = vocabulary.teacher_tokenizer
        if self.section.dtype == "fp8":
            from distill.teachers.backends.fp8 import Fp8Teacher  # a subclass of the teacher here

            return Fp8Teacher(model, skip=self.section.fp8_skip, field=self.field, tokenizer=tokenizer)
        return LoadedTeacher(model, field=self.field, tokenizer=tokenizer)

    def load(self, context: LoadContext) -> Any:
        """A sharded model is patched before it is sharded."""
        device = context.device
        dtype = context.precision.teacher
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
        weights = next(iter(self.frozen_weights(context.precision, sharded=False)), None)
        once = functools.partial(context.checkpoints.load, weights)
        return load_teacher(self.section, device=device, dtype=dtype, once=once)
