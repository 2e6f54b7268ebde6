"""Where a teacher's weights lie and what they weigh: on the device, in 8 bits or fewer, or in host memory.

With P parameters, D of them in the decoder's linear layers, b the bytes of a weight as loaded:

    resident       P b
    fp8, int8      D + (P - D) b                  the linear layers but the head in one byte
    quantised      D bits / 8 + (P - D) b         a checkpoint's own bits; where they are not known it counts as loaded
    offloaded      (P - layers) b + 2 x (largest layer) b      and the layers' b bytes each in host memory

An offloaded teacher's layers cross the bus once in every micro-batch, while the layer before computes, so that its
forward takes max(arithmetic, bytes / rate). The rate is taken to be 80 % of what the GPU's PCIe link is made for in one
direction, 16 lanes wide; of a GPU that is not listed nothing is said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distill.models.precision import Precision
from distill.models.quantised import check_quantisation, method_of, quantisation_of
from distill.recipe import Recipe, Teacher
from distill.recipe.models import EIGHT_BITS

if TYPE_CHECKING:
    from distill.models.shape import Shape

# bytes/s that 16 lanes of PCIe carry in one direction, after encoding: generation 4 and 5
PCIE_4, PCIE_5 = 31.5e9, 63.0e9
LINKS = {
    "A10G": PCIE_4, "A100": PCIE_4, "L4": PCIE_4 / 2, "L40": PCIE_4, "L40S": PCIE_4, "H100": PCIE_5,
    "H100 PCIe": PCIE_5, "H100 NVL": PCIE_5, "H200": PCIE_5, "B200": PCIE_5, "RTX 3090": PCIE_4, "RTX 4090": PCIE_4,
}  # fmt: skip
REACHED = 0.8


def on_device(section: Teacher, teacher: Shape, precision: Precision) -> float:
    """Bytes of a loaded teacher on a device that holds it whole, but for layers that are offloaded."""
    size = precision.teacher.itemsize
    if section.offload is not None:
        return float(teacher.parameters - teacher.layered + 2 * teacher.largest_layer) * size
    bits = 8.0 if section.dtype in EIGHT_BITS else teacher.stored_bits
    saved = 0.0 if bits is None else teacher.linear * (size - bits / 8)
    return teacher.parameters * size - saved


def in_host_memory(section: Teacher, teacher: Shape, precision: Precision) -> float:
    """Bytes of an offloaded teacher that each process keeps in host memory; 0 for any other."""
    if section.offload is None:
        return 0.0
    return float(teacher.layered * precision.teacher.itemsize)


def bus_rate(name: str) -> float | None:
    """Bytes/s to a GPU by its name, None for one that is not listed."""
    known = [part for part in LINKS if part in name]
    return REACHED * LINKS[max(known, key=len)] if known else None


def cannot_be_held(recipe: Recipe, teacher: object, student: object, *, cuda: bool) -> list[str]:
    """Why the two models' configurations rule the run out, for what is quantised or is to be.

    Args:
        recipe: What is asked for.
        teacher, student: The configurations.
        cuda: Whether the device is a GPU.
    """
    found = []
    if recipe.teacher.dtype == "int8" and not cuda:
        found.append("teacher.dtype: int8 needs a CUDA GPU; use bfloat16 or auto")
    if recipe.teacher.is_cached or recipe.teacher.init == "random":
        return found
    try:
        check_quantisation(teacher, recipe.teacher, "teacher")
    except ValueError as error:
        found.append(str(error))
    stored = quantisation_of(teacher)
    cut = recipe.student.init == "pretrained" and recipe.student.from_teacher is not None
    if stored is not None and recipe.teacher.offload is not None:
        found.append(f"teacher.offload: cpu needs weights in floating point; the teacher's are {method_of(stored)}")
    if stored is not None and cut:
        found.append(
            f"student.from_teacher: the teacher is quantised ({method_of(stored)}), and no layers can be cut out of it"
            "; name a student that is cut already by student.model"
        )
    if not cut and recipe.student.init == "pretrained":
        try:
            check_quantisation(student, recipe.student, "student")
        except ValueError as error:
            found.append(str(error))
    return found
