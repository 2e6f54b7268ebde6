"""Values that the phases of a run return: prepared, loaded, opened."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from distill.data.load import Splits
    from distill.objectives.plugin import Plugin
    from distill.planning.run_plan import RunPlan
    from distill.run_results import Before, RunResults
    from distill.teachers.base import TeacherPlan
    from distill.teachers.load_context import LoadContext
    from distill.teachers.opening import ModelPair
    from distill.teachers.vocabulary import Vocabulary
    from distill.training.lock_file import Plain
    from distill.training.resuming import ResumePlan
    from distill.training.trainer import DistillationTrainer
    from distill.training.untrained import UntrainedWeights


class Start(NamedTuple):
    """Arguments that a run is started with.

    Attributes:
        resume: Whether it continues an earlier run; "unverified": also from a checkpoint without a manifest.
        lock: Path of a lock.yaml that it must agree with.
        plugin: Loss functions, rewards or an environment of the user.
        earlier: Folders of the stages before this one; empty for a run without stages, and for its first.
    """

    resume: bool | Literal["unverified"]
    lock: Path | None
    plugin: Plugin | None
    earlier: tuple[Path, ...] = ()


class Prepared(NamedTuple):
    """A run whose recipe and data are known; no weights have been read.

    Attributes:
        context: Device, dtypes, placement and attention back ends that the models are loaded with.
        source: Source of the teacher.
        vocabulary: Tokenizers of teacher and student.
        splits: Training and held-out data.
        plan: Placement and number of steps.
        required: Contents of the lock file that the run must agree with; None without one.
        resumed: Changes since the start of a resumed run; None for a new one.
        last: Checkpoint that a resumed run continues from; None for step 0.
    """

    context: LoadContext
    source: TeacherPlan
    vocabulary: Vocabulary
    splits: Splits
    plan: RunPlan
    required: Plain | None
    resumed: ResumePlan | None
    last: Path | None


class Loaded(NamedTuple):
    """The models of a run, compared with its lock file.

    Attributes:
        pair: Teacher and student.
        arguments: Arguments of the trainer.
        locked: Contents of the run's lock file; None on all processes but the first.
        notes: Lines on the student to print.
    """

    pair: ModelPair
    arguments: TrainingArguments
    locked: Plain | None
    notes: list[str]


class Opened(NamedTuple):
    """A run whose trainer is made and whose folder is written.

    Attributes:
        trainer: Trainer of the student.
        results: Measures the student and writes the results.
        untrained: Measurement of the untrained student, or the weights with which it is made after training.
        last: Checkpoint to continue from; None for step 0.
    """

    trainer: DistillationTrainer
    results: RunResults
    untrained: Before | UntrainedWeights
    last: Path | None
