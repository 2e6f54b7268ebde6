"""Former place of a teacher's classes, read until 1.0: they are in base.py and load_context.py."""

from distill.teachers.base import AcceptedRows as AcceptedRows
from distill.teachers.base import Teacher as Teacher
from distill.teachers.base import TeacherPlan as TeacherPlan
from distill.teachers.base import TeacherPlan as TeacherSource
from distill.teachers.load_context import NO_ROWS as NO_ROWS
from distill.teachers.load_context import Calibration as Calibration
from distill.teachers.load_context import CutRequest as CutRequest
from distill.teachers.load_context import CutStudent as CutStudent
from distill.teachers.load_context import LoadContext as LoadContext
from distill.teachers.load_context import calibration_of as calibration_of
from distill.teachers.load_context import load_context as load_context

__all__ = [
    "NO_ROWS",
    "AcceptedRows",
    "Calibration",
    "CutRequest",
    "CutStudent",
    "LoadContext",
    "Teacher",
    "TeacherPlan",
    "TeacherSource",
    "calibration_of",
    "load_context",
]
