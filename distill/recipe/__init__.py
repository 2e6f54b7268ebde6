"""The recipe: the complete configuration of one distillation run, as a YAML file that is validated field by field.

Each section of the file has a module: `models` (teacher, student), `data`, `loss`, `train`; `schema` combines them,
reads and writes. No module of this package imports torch.
"""

from distill.core.errors import RecipeError
from distill.recipe.data import Data, OnPolicy, Part, Validation
from distill.recipe.from_teacher import FromTeacher, Importance
from distill.recipe.loss import Loss
from distill.recipe.models import Lora, ModelSection, Student, Teacher, WeightedTeacher
from distill.recipe.schema import Generate, Recipe, dump, load, parse
from distill.recipe.train import OWNED_ARGUMENTS, Parallel, Train

__all__ = [
    "OWNED_ARGUMENTS",
    "Data",
    "FromTeacher",
    "Generate",
    "Importance",
    "Lora",
    "Loss",
    "ModelSection",
    "OnPolicy",
    "Parallel",
    "Part",
    "Recipe",
    "RecipeError",
    "Student",
    "Teacher",
    "Train",
    "Validation",
    "WeightedTeacher",
    "dump",
    "load",
    "parse",
]
