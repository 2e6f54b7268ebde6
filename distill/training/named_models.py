"""Models that a `DistillationTrainer` is given by name: loaded as `teacher.model` and `student.model` of a recipe are.

A name is a hub id, a folder, a .gguf file or `package:NAME/FILE.gguf`. The teacher is loaded in the dtype that is
computed in (`bf16` or `fp16` of the arguments, else float32), the student in float32, in which small updates are kept.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainingArguments

from distill.models.head import find_head
from distill.models.load.vocabulary import compare, shared_columns
from distill.models.loading import load_student, load_teacher, load_tokenizer
from distill.recipe import LocalTeacherConfig, Student
from distill.teachers.base import Teacher


def load_named_models(
    student: str | nn.Module, teacher: str | nn.Module | Teacher, args: TrainingArguments
) -> tuple[nn.Module, nn.Module | Teacher, PreTrainedTokenizerBase | None, int | None]:
    """Return student and teacher, each loaded where it is a name, with the tokenizer of a named one.

    The last value are the columns of the vocabulary that two named models share, None for others.

    Raises:
        ValueError: There is no such model; or both are named and an id of their tokenizers means different tokens.
    """
    tokenizer = None
    teacher_tokenizer = None
    columns = None
    # tokenizers first: a pair that cannot be compared is refused before weights are read
    if isinstance(student, str):
        student_section = Student(model=student)
        tokenizer = load_tokenizer(student_section, "student")
    if isinstance(teacher, str):
        teacher_section = LocalTeacherConfig(model=teacher)
        teacher_tokenizer = load_tokenizer(teacher_section, "teacher")
    if tokenizer is not None and teacher_tokenizer is not None:
        compare(teacher_tokenizer, tokenizer).require()
    if isinstance(teacher, str):
        computed = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
        teacher = load_teacher(teacher_section, device=args.device, dtype=computed)
    if isinstance(student, str):
        loaded: nn.Module = load_student(student_section, device=args.device, dtype=torch.float32)
    else:
        loaded = student
    if tokenizer is not None and teacher_tokenizer is not None:
        assert isinstance(teacher, nn.Module)
        rows = [len(find_head(model).linear.weight) for model in (teacher, loaded)]  # type: ignore[arg-type]
        columns, _ = shared_columns(teacher_tokenizer, tokenizer, *rows)
    return loaded, teacher, tokenizer or teacher_tokenizer, columns
