"""The recipe: the complete configuration of one distillation run, as a YAML file that is validated field by field.

Each section of the file has a module: `teacher_config`, `models` (student), `data`, `loss`, `train`; `schema` combines
them, reads and writes. No module of this package imports torch.
"""

from distill.core.errors import RecipeError
from distill.recipe.data import Data, DataPart, OnPolicy, Validation
from distill.recipe.from_teacher import FromTeacher, Importance
from distill.recipe.loss import Loss
from distill.recipe.models import Lora, ModelSection, Student
from distill.recipe.schema import Generate, Recipe, dump, load, parse
from distill.recipe.teacher_config import (
    ComputedTeacherConfig,
    Context,
    LoadedTeacherConfig,
    LocalTeacherConfig,
    PluginTeacherConfig,
    ServedTeacherConfig,
    StoredTeacherConfig,
    StudentTeacherConfig,
    TeacherConfig,
    WeightedLocalTeacherConfig,
)
from distill.recipe.train import OWNED_ARGUMENTS, Parallel, Train

__all__ = [
    "OWNED_ARGUMENTS",
    "ComputedTeacherConfig",
    "Context",
    "Data",
    "DataPart",
    "FromTeacher",
    "Generate",
    "Importance",
    "LoadedTeacherConfig",
    "LocalTeacherConfig",
    "Lora",
    "Loss",
    "ModelSection",
    "OnPolicy",
    "Parallel",
    "PluginTeacherConfig",
    "Recipe",
    "RecipeError",
    "ServedTeacherConfig",
    "StoredTeacherConfig",
    "Student",
    "StudentTeacherConfig",
    "TeacherConfig",
    "Train",
    "Validation",
    "WeightedLocalTeacherConfig",
    "dump",
    "load",
    "parse",
]
