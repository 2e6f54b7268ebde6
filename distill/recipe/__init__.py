"""The recipe: everything one distillation run is told, as a YAML file checked field by field.

A section of the file is a module here: `models` (teacher, student), `data`, `loss`, `train`; `schema` puts them
together, reads and writes. No module of this package imports torch.
"""

from distill.core.errors import RecipeError
from distill.recipe.data import Data, OnPolicy, Part, Validation
from distill.recipe.loss import Loss
from distill.recipe.models import FromTeacher, Lora, ModelSection, Student, Teacher, WeightedTeacher
from distill.recipe.schema import Generate, Recipe, dump, load, parse
from distill.recipe.train import OWNED_ARGUMENTS, Parallel, Train

__all__ = [
    "OWNED_ARGUMENTS",
    "Data",
    "FromTeacher",
    "Generate",
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
