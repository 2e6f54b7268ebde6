"""Layers of student and teacher that a loss compares, their states in a step, and projections between widths.

    matching = layer_matching(teacher.models, student, section)
    with matching.record_teacher() as states: targets = teacher.targets(batch)
    with states.record_student(position_ids): hidden = decoder(...)
    # `states` reaches the terms' losses (layer_losses.py) through the student's forward

Only a teacher whose model runs in this process has states of layers; they are recorded while it computes its targets.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedConfig

from distill.core.errors import RunError
from distill.core.tensor_files import write_tensors
from distill.models.head import attention_sizes, unwrap_peft
from distill.models.layer_states import LayerStates, StateRecorder
from distill.models.layers import layer_count
from distill.models.routers import find_routers, routing_of_model
from distill.models.routing import routing_of
from distill.objectives.router_losses import RouterSums, StudentRouters, router_coefficients
from distill.recipe.layer_terms import AttentionRelationTerm, HiddenStateTerm, RouterTerm, pairs_of
from distill.recipe.loss import Loss

FILE = "layer_projections.safetensors"  # in a checkpoint
MODULE = "layer_projections"  # of the student, while it trains
AnyTerm = HiddenStateTerm | AttentionRelationTerm | RouterTerm


class LayerProjection(nn.Module):
    """Linear map of the student's hidden states to the teacher's width, trained with the student.

    It has no entry in state dicts: a saved or exported student does not have it, and checkpoints hold it in a file of
    its own.

    Args:
        teacher: Width of the teacher's hidden states.
        student: Width of the student's; where both are equal the map begins as the identity.
        like: Tensor whose device and dtype the weight gets.
    """

    def __init__(self, teacher: int, student: int, like: torch.Tensor) -> None:
        super().__init__()
        weight = torch.eye(student)
        if teacher != student:
            # a generator of its own: every rank begins with the same map, and no other random number changes
            generator = torch.Generator().manual_seed(0)
            weight = torch.randn(teacher, student, generator=generator) / math.sqrt(student)
        self.weight = nn.Parameter(weight.to(like.device, like.dtype))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return states [..., teacher's width] of states [..., student's width]."""
        if not torch.is_autocast_enabled(states.device.type):
            states = states.to(self.weight.dtype)
        return nn.functional.linear(states, self.weight)

    def _save_to_state_dict(self, *args: object, **kwargs: object) -> None:
        return

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        return


class MatchedTerm(NamedTuple):
    """A term of the recipe with what follows from the two models.

    Attributes:
        term: Term of the recipe, at weight 1.
        name: Name of its metric.
        pairs: Numbers of the layers that are compared, [student, teacher].
        widths: Hidden sizes of both models, [student, teacher].
        heads: Number of relation heads; 0 for hidden states.
        projection: Projection of the student's states to the teacher's width; None without one.
    """

    term: AnyTerm
    name: str
    pairs: list[tuple[int, int]]
    widths: tuple[int, int]
    heads: int = 0
    projection: LayerProjection | None = None

    @property
    def is_projected(self) -> bool:
        return isinstance(self.term, HiddenStateTerm) and self.term.projection == "learned"


def document_numbers(position_ids: torch.Tensor | None, attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return a number for each document of a row, -1 for its padding; None for one document a row without padding.

    Args:
        position_ids: int64 [B, S], 0 at each document's first token; None for one document a row.
        attention_mask: [B, S], 0 at padding, which is nobody's key; None without padding.
    """
    numbers = None if position_ids is None else (position_ids == 0).cumsum(-1)
    if attention_mask is None:
        return numbers
    padding = attention_mask == 0
    return torch.where(padding, -1, 0 if numbers is None else numbers)


class StepStates:
    """States of both models in one micro-batch, and the sums of the terms over its tokens.

    Attributes:
        matching: Terms that are compared.
        student: States of the student, once its decoder has run.
        documents: int64 [B, S], a number for each document of a row; None for one document a row.
        sums: By name of the term: its sum over the trained tokens, without weight, and their number, fp32 [2].
        router_sums: What the figures of the student's routers are made of; None for a dense student.
    """

    def __init__(self, matching: LayerMatching, teacher: LayerStates) -> None:
        self.matching = matching
        self.teacher = teacher
        self.student = LayerStates({}, {}, {})
        self.documents: torch.Tensor | None = None
        self.sums: dict[str, torch.Tensor] = {}
        self.router_sums: RouterSums | None = None

    @contextlib.contextmanager
    def record_student(
        self, position_ids: torch.Tensor | None, attention_mask: torch.Tensor | None = None
    ) -> Iterator[None]:
        self.documents = document_numbers(position_ids, attention_mask)
        with self.matching.of_student.record() as self.student:
            yield

    def record(self, name: str, values: torch.Tensor) -> None:
        """Add a term's losses of the trained tokens to the metrics."""
        count = torch.full((), len(values), dtype=torch.float32, device=values.device)
        self.sums[name] = torch.stack([values.detach().sum().float(), count])

    def router_loss(
        self,
        mask: torch.Tensor | None,
        trained: torch.Tensor | int,
        divisor: torch.Tensor | int | None,
        *,
        statistics: bool,
    ) -> torch.Tensor | float:
        """Return what the routers' losses add to the loss of the micro-batch; 0 without such losses.

        Args:
            mask: bool [B, S], False at padding; None without padding.
            trained: Number of the micro-batch's trained tokens.
            divisor: Trained tokens of the whole step, by which summed losses are divided; None for this batch's.
            statistics: Whether the sums of the figures are computed too.

        Raises:
            ValueError: Losses are asked for and a router has no logit for each token and expert.
        """
        routers = self.matching.routers
        if routers is None:
            return 0.0
        outputs = self.student.routers
        if not outputs:
            if self.matching.trains_routers:
                raise ValueError(
                    "loss.router: expected routers with a logit for each token and expert, got other outputs; set "
                    "loss.router to none"
                )
            return 0.0
        flat = None if mask is None else mask.flatten()
        device = next(iter(outputs.values()))[0].logits.device
        total: torch.Tensor | float = 0.0
        losses = torch.zeros(3, device=device)
        if routers.are_trained:
            balance, z = routers.losses(outputs, flat)
            weights = routers.coefficients
            total = weights.balance * balance + weights.z * z
            if divisor is not None:
                total = total * (trained / divisor)
            count = torch.as_tensor(trained, device=device)
            losses = torch.stack([balance.detach() * count, z.detach() * count, count]).float()
        if statistics:
            self.router_sums = routers.sums(outputs, self.teacher.routers, flat, losses)
        return total

    def unused(self) -> torch.Tensor | float:
        """Return a 0 whose gradient reaches the projections that no term of the step has used.

        A term whose scheduled weight is 0 leaves its projection out, and DDP waits for the gradient of each parameter.
        """
        total: torch.Tensor | float = 0.0
        for matched in self.matching.terms:
            if matched.projection is not None and matched.name not in self.sums:
                total = total + 0.0 * matched.projection.weight.sum()
        return total


class LayerMatching:
    """The layers that a loss compares, and its projections, which are a part of the student until `detach`.

    Args:
        terms: Terms that compare layers; empty where the student's routers alone are recorded.
        teacher: Model whose layers are recorded; None for none.
        student: Causal language model, bare or inside PEFT.
        routers: What is computed from the student's routers; None for a dense student.
    """

    def __init__(
        self,
        terms: Sequence[MatchedTerm],
        teacher: nn.Module | None,
        student: nn.Module,
        routers: StudentRouters | None = None,
    ) -> None:
        self.terms = terms
        self.teacher = teacher
        self.routers = routers
        self.inner = unwrap_peft(student)
        self.of_student = self._recorder(student, 0)
        self.of_teacher = None if teacher is None else self._recorder(teacher, 1)
        self.projections = nn.ModuleList(each.projection for each in terms if each.projection is not None)
        if len(self.projections):
            # As a part of the student the projections get gradients, an optimizer state and a place under DDP and FSDP
            # as its own weights do.
            self.inner.add_module(MODULE, self.projections)

    @property
    def trains_routers(self) -> bool:
        """Return whether the training loss has a loss of the student's routers."""
        return self.routers is not None and self.routers.are_trained

    def detach(self) -> None:
        if len(self.projections):
            self.inner._modules.pop(MODULE, None)

    def find(self, term: AnyTerm) -> MatchedTerm:
        """Return what belongs to a term of the recipe, whatever its weight in this step."""
        return next(each for each in self.terms if each.term == term.model_copy(update={"weight": 1.0}))

    def _recorder(self, model: nn.Module, side: int) -> StateRecorder:
        """Return the recorder of the compared states of the student (`side` 0) or the teacher (1)."""
        outputs = self._layers(HiddenStateTerm, side)
        attention = self._layers(AttentionRelationTerm, side)
        routers: list[int] = []
        if self.routers is not None:
            routers = [pair[1] for pair in self.routers.compared] if side else self.routers.layers
        matched = self._layers(RouterTerm, side)
        gradients = not side and (self.trains_routers or bool(matched))
        return StateRecorder(model, outputs, attention, sorted({*routers, *matched}), gradients)

    def _layers(self, kind: type[AnyTerm], side: int) -> list[int]:
        of_kind = [matched for matched in self.terms if isinstance(matched.term, kind)]
        return sorted({pair[side] for matched in of_kind for pair in matched.pairs})

    @contextlib.contextmanager
    def record_teacher(self, *, runs: bool = True) -> Iterator[StepStates]:
        """Record the teacher's states inside the block, in which it computes its targets if it `runs`."""
        if self.of_teacher is None or not runs:
            yield StepStates(self, LayerStates({}, {}, {}))
            return
        with self.of_teacher.record() as states:
            yield StepStates(self, states)

    def save(self, checkpoint: Path, *, writes: bool) -> None:
        """Write the projections into a checkpoint's folder; all processes call it, and the one that `writes` does."""
        weights = {str(index): _whole(projection.weight) for index, projection in enumerate(self._projections())}
        if weights and writes:
            write_tensors(checkpoint / FILE, weights)

    @torch.no_grad()
    def restore(self, checkpoint: Path) -> None:
        """Restore the projections of a checkpoint; all processes call it.

        Raises:
            RunError: The checkpoint has none.
        """
        if not len(self.projections):
            return
        if not (checkpoint / FILE).is_file():
            raise RunError(
                f"--resume: {checkpoint}: expected {FILE}, since the recipe has a learned projection; move the folder "
                "away to use an older checkpoint"
            )
        saved = load_file(checkpoint / FILE)
        for index, projection in enumerate(self._projections()):
            weight = projection.weight
            value = saved[str(index)].to(weight.device)
            if isinstance(weight, DTensor):
                # every process has read the whole weight, and keeps its shard
                value = distribute_tensor(value, weight.device_mesh, weight.placements)
            weight.copy_(value)

    def _projections(self) -> Iterator[LayerProjection]:
        return (each.projection for each in self.terms if each.projection is not None)


def layer_matching(
    teachers: Mapping[str, nn.Module],
    student: nn.Module,
    section: Loss | None,
    same_rows: nn.Module | None = None,
) -> LayerMatching | None:
    """Return the layers that a step records; None where the loss compares none and the student is dense.

    Args:
        teachers: Models of the teacher in this process, by field.
        student: Causal language model, bare or inside PEFT, on its device.
        section: Loss of the objective; None for one that is no section of a recipe.
        same_rows: Model of the teacher that reads the student's batches as they are; None where there is none.

    Raises:
        ValueError: The loss compares layers and the teacher has no such model, a layer does not exist, widths differ
            without a projection, or heads cannot be divided; or the student has no routers for their losses.
    """
    routers = student_routers(student, section, same_rows)
    if section is None or not section.reads_layers:
        if routers is None:
            return None
        return LayerMatching([], same_rows if routers.compared else None, student, routers)
    if len(teachers) != 1:
        raise ValueError(
            "loss.terms: hidden_state, attention_relation and router require one teacher whose model runs in this "
            f"process; got {len(teachers)} models"
        )
    (model,) = teachers.values()
    # as a trained weight: adapters may be float32 over a base model in 16 bits
    trained = (p for p in unwrap_peft(student).parameters() if p.requires_grad and p.is_floating_point())
    like = next(trained, next(student.parameters()))
    terms = []
    for matched in matched_terms(section, unwrap_peft(student).config, unwrap_peft(model).config):  # type: ignore[arg-type]
        if matched.is_projected:
            own_width, teacher_width = matched.widths
            matched = matched._replace(projection=LayerProjection(teacher_width, own_width, like))
        if isinstance(matched.term, RouterTerm):
            matched = matched._replace(pairs=router_pairs(matched, student, model))
        terms.append(matched)
    return LayerMatching(terms, model, student, routers)


def router_pairs(matched: MatchedTerm, student: nn.Module, teacher: nn.Module) -> list[tuple[int, int]]:
    """Return the pairs of layers with routers that a term `router` compares; of `auto` those where both have one.

    Raises:
        ValueError: A given layer has no router, or no pair has.
    """
    own = find_routers(student)
    other = find_routers(teacher)
    pairs = [(a, b) for a, b in matched.pairs if len(own.get(a, ())) == len(other.get(b, ())) > 0]
    without = [list(pair) for pair in matched.pairs if pair not in pairs]
    if not pairs or (without and matched.term.layers != "auto"):
        raise ValueError(f"loss.terms: router: layers: expected layers with a router in both models, got {without[0]}")
    return pairs


def student_routers(student: nn.Module, section: Loss | None, same_rows: nn.Module | None) -> StudentRouters | None:
    """Return what is computed from a student's routers; None for a student without. Arguments as above.

    The choices of both models are compared where they have the same number of layers, with routers of as many experts
    in the same ones.

    Raises:
        ValueError: The loss has losses of the routers, and the student has no routers.
    """
    coefficients = router_coefficients("config" if section is None else section.router, student)
    routers = find_routers(student)
    routing = routing_of_model(student)
    if routing is None or not routers:
        if coefficients.balance > 0 or coefficients.z > 0:
            raise ValueError(
                "loss.router: expected a student that is a mixture of experts, whose class declares router logits; got "
                f"{type(unwrap_peft(student)).__name__}; set loss.router to none"
            )
        return None
    compared: list[tuple[int, int]] = []
    if same_rows is not None and routing_of_model(same_rows) is not None:
        other = find_routers(same_rows)
        alike = {number: len(own) for number, own in routers.items()} == {n: len(own) for n, own in other.items()}
        configs = [unwrap_peft(model).config for model in (student, same_rows)]
        if alike and layer_count(configs[0]) == layer_count(configs[1]) and routing_of_model(same_rows) == routing:
            compared = [(number, number) for number in routers]
    return StudentRouters(list(routers), routing.experts, routing.per_token, coefficients, compared)


def matched_terms(loss: Loss, student: PreTrainedConfig, teacher: PreTrainedConfig) -> list[MatchedTerm]:
    """Return the terms of a loss that compare layers, without projections.

    Raises:
        ValueError: A layer does not exist, widths differ without a projection, or heads cannot be divided.
    """
    found: list[MatchedTerm] = []
    for term in loss.terms:
        if isinstance(term, AnyTerm) and term.weight > 0:
            same = sum(each.term.type == term.type for each in found)
            found.append(_matched(term, f"{term.type}-{same + 1}" if same else term.type, student, teacher))
    return found


def _matched(term: AnyTerm, name: str, student: PreTrainedConfig, teacher: PreTrainedConfig) -> MatchedTerm:
    pairs = pairs_of(term.layers, layer_count(student), layer_count(teacher))
    width = student.get_text_config().hidden_size
    wanted = teacher.get_text_config().hidden_size
    plain = term.model_copy(update={"weight": 1.0})
    if isinstance(term, RouterTerm):
        experts = [routing_of(config.get_text_config()) for config in (student, teacher)]
        counts = [0 if each is None else each.experts for each in experts]
        if counts[0] != counts[1] or not counts[0]:
            raise ValueError(
                "loss.terms: router expects two mixtures of as many experts, got a student of "
                f"{counts[0] or 'no'} experts and a teacher of {counts[1] or 'none'}"
            )
        return MatchedTerm(plain, name, pairs, (counts[0], counts[1]))
    if isinstance(term, AttentionRelationTerm):
        pairs = pairs[-1:] if term.layers == "auto" else pairs
        return MatchedTerm(
            plain, name, pairs, (width, wanted), relation_heads(term, _widths(student), _widths(teacher))
        )
    if term.projection == "none" and width != wanted:
        raise ValueError(
            f"loss.terms: hidden_state with projection: none expects a student of the teacher's width {wanted}, got "
            f"{width}; set projection to learned"
        )
    return MatchedTerm(plain, name, pairs, (width, wanted))


def _widths(config: PreTrainedConfig) -> tuple[int, dict[str, int]]:
    """Return a model's number of key-value heads, and the widths of its queries, keys and values."""
    heads, pairs, width = attention_sizes(config.get_text_config())
    if not heads:
        raise ValueError("loss.terms: attention_relation expects models with attention, got one without")
    return pairs, {"query": heads * width, "key": pairs * width, "value": pairs * width}


def relation_heads(
    term: AttentionRelationTerm, student: tuple[int, Mapping[str, int]], teacher: tuple[int, Mapping[str, int]]
) -> int:
    """Return the number of relation heads of a term.

    Args:
        student, teacher: Number of key-value heads, and the width of each relation.

    Raises:
        ValueError: The number does not divide a width.
    """
    heads = term.heads or math.gcd(student[0], teacher[0])
    for name in term.relations:
        for whose, (_, widths) in (("student", student), ("teacher", teacher)):
            if widths[name] % heads:
                raise ValueError(
                    f"loss.terms: attention_relation: heads: expected a divisor of the {whose}'s width of {name}, "
                    f"{widths[name]}, got {heads}"
                )
    return heads


def _whole(weight: torch.Tensor) -> torch.Tensor:
    whole: torch.Tensor = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return whole.detach().cpu().contiguous()
