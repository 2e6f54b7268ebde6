"""Memory of the terms that compare layers, and the check that both models have the layers and widths.

With N tokens in a micro-batch, t the bytes of the teacher's states, c those of what is computed in, and P pairs:

    teacher's states    N t (width of each layer that is compared, and of its queries, keys and values)
    projected states    N c P (teacher's width + student's width), kept for the backward
    projection          teacher's width x student's width: weight, gradient and two states
    router              16 N experts P: logits and probabilities of both models in fp32
    routers             8 N experts for each router whose losses are trained on: logits and probabilities in fp32

The student's states are among its activations, but for queries, keys and values of layers that are computed again.
"""

from __future__ import annotations

from typing import NamedTuple

from distill.models.layers import layer_count, layer_indices
from distill.models.meta_models import meta_config
from distill.objectives.layer_matching import MatchedTerm, matched_terms, student_routers
from distill.objectives.router_losses import StudentRouters
from distill.planning.device_plan import DevicePlan
from distill.recipe.layer_terms import HiddenStateTerm


class LayerMemory(NamedTuple):
    """Bytes on each device.

    Attributes:
        projections: Weights, gradients and optimizer states of projections.
        states: Kept states of a micro-batch.
    """

    projections: float = 0.0
    states: float = 0.0


def planned_terms(plan: DevicePlan) -> list[MatchedTerm]:
    """Return the terms that compare layers, from both configurations.

    Raises:
        ValueError: Both models cannot be compared in this way.
    """
    recipe = plan.recipe
    loss = plan.recipe.loss
    if not loss.reads_layers:
        return []
    teacher = meta_config(plan.source.config_section(), "teacher")
    if recipe.student.is_cut:
        loss = loss.with_kept_layers(layer_indices(recipe.student.from_teacher, layer_count(teacher)))
    return matched_terms(loss, plan.student.config, teacher)


def planned_routers(plan: DevicePlan) -> StudentRouters | None:
    """Return what is computed from the student's routers; None for a dense student.

    Raises:
        ValueError: Losses of the routers of a student without routers.
    """
    return student_routers(plan.student.model, plan.recipe.loss, None)


def router_note(plan: DevicePlan) -> str | None:
    """Return the line about the routers' losses in the training loss; None without any."""
    routers = None if layer_problems(plan) else planned_routers(plan)
    if routers is None or not routers.are_trained:
        return None
    weights = routers.coefficients
    source = ", as the student's configuration has them" if plan.recipe.loss.router == "config" else ""
    return f"loss.router: the loss has {weights.balance:g} x load balancing and {weights.z:g} x z-loss{source}"


def layer_problems(plan: DevicePlan) -> list[str]:
    """Return why layers cannot be compared, or the student has no routers for their losses; empty otherwise."""
    try:
        planned_terms(plan)
        planned_routers(plan)
    except ValueError as error:
        return [str(error)]
    return []


def layer_memory(plan: DevicePlan, share: int = 1) -> LayerMemory:
    """Return the memory of the terms that compare layers; zeros where they cannot be computed.

    Args:
        share: Devices over which a projection is divided.
    """
    if layer_problems(plan):
        return LayerMemory()
    recipe = plan.recipe
    tokens = recipe.train.batch_size * recipe.data.max_length
    routers = planned_routers(plan)
    of_routers = 0.0
    if routers is not None and routers.are_trained:
        of_routers = 8.0 * tokens * routers.experts * len(routers.layers)
    terms = planned_terms(plan)
    if not terms:
        return LayerMemory(0.0, of_routers)
    precision = plan.precision
    student = plan.student.shape
    (teacher,) = plan.source.shapes()
    compute = precision.compute.itemsize
    outputs = {other for each in terms if isinstance(each.term, HiddenStateTerm) for _, other in each.pairs}
    attention = {other for each in terms if each.heads for _, other in each.pairs}
    again = (
        {own for each in terms if each.heads for own, _ in each.pairs} if recipe.train.gradient_checkpointing else ()
    )
    numbers = len(outputs) * teacher.hidden + len(attention) * (teacher.query + 2 * teacher.key_value)
    states = float(tokens * precision.teacher.itemsize * numbers)
    states += sum(16.0 * tokens * each.widths[0] * len(each.pairs) for each in terms if each.term.type == "router")
    states += tokens * compute * len(again) * (student.query + 2 * student.key_value)
    projections = 0.0
    for each in terms:
        if each.is_projected:
            states += tokens * compute * len(each.pairs) * sum(each.widths)
            weight = 4 if student.rank else precision.student.itemsize
            projections += 4 * weight * each.widths[0] * each.widths[1] / share
    return LayerMemory(projections, states + of_routers)
