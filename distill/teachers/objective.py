"""The distillation objective: a teacher of any kind, the loss, and a student forward that computes it without logits.

The objective holds the teacher and patches `student.forward`. A call that carries `StepInputs` runs the student's
decoder through its own modules, then the fused loss inside the head's own `__call__`, all within the (possibly DDP-
or FSDP-wrapped) student's forward, so that every wrapper's hooks fire; any other call falls through to the original,
so `generate` and `save_pretrained` work as before. The teacher is no submodule of the student: its weights are
neither trained, saved, sharded nor broadcast with it.

    objective = DistillationObjective(teacher, student, loss={"terms": [{"type": "reverse_kl"}]})
    output = student(**objective.student_inputs(batch, num_items=n))     # {"loss": scalar, "statistics": [7]}

The mean is over `num_items`, the valid tokens of the whole optimizer step. Labels are shifted here, once.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from distill_kernels import FusedDistillationLoss, LossTerm
from torch import nn

from distill.core.labels import IGNORE_INDEX, count_trained_tokens, mask_document_starts, shift_labels
from distill.models.head import HeadWeights, call_head, decoder_of, find_head, probe_logits, unwrap_peft
from distill.models.patch.corrections import correct_forward
from distill.models.patch.swaps import Swap, replace_forward, restore_swaps, swap_module
from distill.objectives.layer_matching import LayerMatching, layer_matching
from distill.objectives.losses import (
    KL,
    STATISTICS,
    LossSpec,
    TargetLoss,
    measured_terms,
    reads_layers,
    single_losses,
    soft_terms,
)
from distill.objectives.measure import DivergenceUnit
from distill.objectives.router_losses import StudentRouters
from distill.objectives.targets import (
    Batch,
    HeadForward,
    LossResult,
    OpaqueInputs,
    StepInputs,
    Targets,
    VocabularyAlignment,
)
from distill.objectives.token_weights import (
    OF_STUDENT,
    OF_TEACHER,
    TokenWeighting,
    WeightedTokens,
    WeightFunction,
    batch_arrays,
)
from distill.recipe.loss import Loss
from distill.teachers.backends.local import LoadedTeacher
from distill.teachers.base import Teacher

COMPARED = 32  # tokens of an on-policy micro-batch whose most probable tokens are compared
B = TypeVar("B", bound=Mapping[str, Any])


def as_teacher(teacher: nn.Module | Teacher) -> Teacher:
    """Return a `Teacher`: a causal language model becomes a `LoadedTeacher`, frozen and in eval mode."""
    if not isinstance(teacher, nn.Module):
        return teacher
    return LoadedTeacher(teacher)


def refuse_shared(teacher: nn.Module, student: nn.Module) -> None:
    """Raise ValueError where the teacher, which is frozen, has parameters that the student trains."""
    frozen = {id(parameter) for parameter in teacher.parameters()}
    shared = [name for name, each in student.named_parameters() if each.requires_grad and id(each) in frozen]
    if shared:
        raise ValueError(
            f"teacher: expected weights of its own, got {len(shared)} that the student trains ({shared[0]}), and that "
            "would be frozen; use copy.deepcopy"
        )


class LossWatcher(Protocol):
    """Observer of each loss as it is computed, inside the student's forward."""

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Return the context that the loss is computed in, the phase `loss`."""
        ...

    def loss_computed(self, batch: Batch, result: LossResult) -> None:
        """Take the loss of a collated batch, with its statistics per token."""
        ...


class StudentForward(Swap):
    """Swap of a student's forward for one that computes the loss where a call carries `StepInputs`."""

    kind = "distillation"
    survives_unpatch = True
    outermost = True

    def __init__(self, objective: DistillationObjective) -> None:
        self.objective = objective

    def __deepcopy__(self, memo: object) -> StudentForward:
        return self  # a copy of a student has the same objective

    def applies(self, module: nn.Module) -> str | None:
        """Return the adapter of a student, bare or inside PEFT, that adds positions."""
        for name, config in (getattr(module, "peft_config", None) or {}).items():
            if getattr(config, "is_prompt_learning", False):
                return f"student: adapter {name!r} is prompt learning ({config.peft_type}), which adds positions"
        return None

    def swap(self, module: nn.Module) -> None:
        objective = self.objective
        before = module.__dict__.get("forward")

        @functools.wraps(type(module).forward)
        def forward(model: Any, *args: Any, step_inputs: OpaqueInputs | None = None, **kwargs: Any) -> Any:
            if step_inputs is not None:
                return objective.student_forward(model, step_inputs.value, **kwargs)
            return before(*args, **kwargs) if before else type(model).forward(model, *args, **kwargs)

        replace_forward(module, forward)


class DistillationObjective:
    """Teacher, loss and the patched student.

    Args:
        teacher: A causal language model on the student's device (put in eval mode, its parameters frozen), or any
            `distill.teachers.base.Teacher`.
        student: A causal language model, bare or inside PEFT, before any DDP or FSDP wrapping. Its forward is
            patched (`detach` restores it). Adapters may still be added later.
        loss: A recipe's `loss` section (object or mapping), the name of one divergence, a sequence of `LossTerm`,
            or a fused loss module, which is then used as it is.
        vocab_size: Both models' logits are cut to this many columns; None for the smaller of the two heads.
        token_weights: Function of the tokens' weights, of arrays that its parameters name
            (`distill.objectives.token_weights`), beside the forms of `loss.token_weights`; None for none.

    Raises:
        ValueError: for a head that the fused loss would read wrongly, an unknown loss, a vocabulary too large, a
            teacher that shares trained weights with the student, or token weights that cannot be computed.
    """

    def __init__(
        self,
        teacher: nn.Module | Teacher,
        student: nn.Module,
        loss: LossSpec = "forward_kl",
        *,
        vocab_size: int | None = None,
        token_weights: WeightFunction | None = None,
    ) -> None:
        self._forward = StudentForward(self)
        reason = self._forward.applies(student)
        if reason is not None:
            raise ValueError(reason)
        if isinstance(teacher, nn.Module):
            refuse_shared(teacher, student)
        # before the teacher is opened, which runs it on a few tokens
        models = {"teacher": teacher} if isinstance(teacher, nn.Module) else teacher.models
        for role, model in {"student": student, **models}.items():
            correct_forward(model, field=f"{role}'s attention")
        self.teacher = as_teacher(teacher)
        rows = len(find_head(student).linear.weight)  # type: ignore[arg-type]
        self.alignment: VocabularyAlignment = self.teacher.format.pair(
            probe_logits(student, "student"), rows, vocab_size
        )
        loss = Loss.model_validate(loss) if isinstance(loss, Mapping) else loss
        self.loss: TargetLoss = self.teacher.format.loss(loss, self.alignment)
        section = loss if isinstance(loss, Loss) else None
        same_rows = self.teacher.model if isinstance(self.teacher, LoadedTeacher) else None
        self.layers: LayerMatching | None = layer_matching(self.teacher.models, student, section, same_rows)
        self.weighting: TokenWeighting | None = None
        weights = None if section is None else section.token_weights
        if weights is not None or token_weights is not None:
            self.weighting = TokenWeighting(weights, token_weights)
        self._student: nn.Module | None = None
        self.scheduled_weight: float | None = None  # of all divergences in the present step; None without a schedule
        self._watcher: LossWatcher | None = None
        self.attach(student)

    def attach(self, student: nn.Module) -> None:
        """Patch `student.forward`; the innermost transformers model is patched, whatever wraps it."""
        reason = self._forward.applies(student)
        if reason is not None:
            raise ValueError(reason)
        self.detach()
        self._student = unwrap_peft(student)
        swap_module(student, self._forward, self._student)

    @property
    def student(self) -> Any:
        """The transformers model whose forward is patched, inside whatever wraps it."""
        assert self._student is not None, "the objective is detached"
        return self._student

    def detach(self) -> None:
        """Restore the student's own forward."""
        if self._student is None:
            return
        restore_swaps(self._student, self._forward)
        self._student = None
        if self.layers is not None:
            self.layers.detach()

    def watch(self, watcher: LossWatcher) -> None:
        self._watcher = watcher

    def use(self, loss: TargetLoss) -> None:
        """Use another loss from now on, that of a schedule's present step."""
        self.loss = loss
        name, weight = self.divergence
        self.scheduled_weight = weight if name else 0.0

    def targets(self, inputs: Batch) -> Targets | None:
        """Return the teacher's targets of a batch, for the student's forward; None where the loss needs none."""
        if not self.needs_targets:
            return None
        for model in self.teacher.models.values():
            if model.training:  # by `train()` of a module that contains it
                model.eval()
        return self.teacher.targets(inputs)

    def prefetch(self, batches: Iterable[B], least: int = 0) -> Iterator[B]:
        """Yield the batches in their order, while those that follow are submitted to the teacher, where it prefetches.

        Args:
            batches: collated; up to `Teacher.prefetch_depth` of them are taken before they are yielded.
            least: batches to submit ahead at least, where the teacher prefetches.
        """
        waiting = collections.deque[B]()
        depth = self.teacher.prefetch_depth
        count = max(depth, least) if depth else 0
        for batch in batches:
            if count and self.needs_targets:
                self.teacher.prefetch(batch)
            waiting.append(batch)
            if len(waiting) > count:
                yield waiting.popleft()
        yield from waiting

    def student_inputs(
        self,
        inputs: Mapping[str, Any],
        num_items: torch.Tensor | int | None = None,
        *,
        statistics: bool = True,
        weighted: bool = True,
        weight_sum: torch.Tensor | float | None = None,
    ) -> dict[str, Any]:
        """Run the teacher and return the keyword arguments to call the student with.

        Args:
            inputs: A collated batch: `input_ids`, `labels` [B, S] int64, not shifted, -100 where masked
                from the loss; `position_ids` and `valid_rows` if the collator gives them. Where positions restart, the
                label of a document's first token is ignored. `sampled_log_p` and `advantages` [B, S], of tokens that
                the student sampled; `rewards` are not used. `content_mask` bool [B, S], False at padding, for losses
                and figures of a student's routers; without it `attention_mask` counts.
            num_items: Divisor of the summed loss, int or integer tensor []; None for the valid tokens of this batch.
            statistics: True to return sums of the token statistics too.
            weighted: False for the loss without token weights, as in evaluations.
            weight_sum: Sum of the token weights of the step (`weight_sum` of all its micro-batches), where they are
                divided by it and `num_items` is given.
        """
        if "labels" not in inputs or "input_ids" not in inputs:
            raise ValueError(f"batch: expected input_ids and labels, got {sorted(inputs)}")
        batch = inputs
        inputs = {**inputs, "labels": mask_document_starts(inputs["labels"], inputs.get("position_ids"))}
        drawn = inputs.pop("sampled_log_p", None)
        drawn = drawn if drawn is None else nn.functional.pad(drawn, (0, 1), value=torch.nan)[:, 1:]
        advantages = inputs.pop("advantages", None)
        inputs.pop("rewards", None)
        inputs.pop("content_mask", None)  # read from the batch, where the student's routers need it
        advantages = advantages if advantages is None else nn.functional.pad(advantages, (0, 1))[:, 1:]
        own = self.teacher.student_batch(inputs, self.needs_targets)
        recorded = None
        if self.layers is not None and (reads_layers(self.loss) or self.layers.routers is not None):
            recorded = self.layers
        with recorded.record_teacher(runs=self.needs_targets) if recorded is not None else nullcontext() as layers:
            targets = self.targets(inputs)
        weighted = weighted and self.weighting is not None
        if weighted and self.weighting.normalises and num_items is not None and weight_sum is None:  # type: ignore[union-attr]
            raise ValueError(
                "weight_sum: expected the sum of the step's token weights beside num_items, since "
                "loss.token_weights.normalise is mean; got none"
            )
        step = StepInputs(
            targets,
            num_items,
            statistics,
            drawn,
            advantages,
            self.scheduled_weight,
            batch,
            layers,
            weighted=weighted,
            weight_sum=weight_sum,
        )
        return {**own, "step_inputs": OpaqueInputs(step)}

    def weight_sum(self, batch: Batch) -> torch.Tensor | None:
        """Return the sum of a batch's token weights, float64 []; None where the step is not divided by it."""
        if self.weighting is None or not self.weighting.normalises:
            return None
        return self.weighting.sum_of(batch)

    def loss_of(
        self,
        hidden: torch.Tensor,
        head: HeadWeights,
        inputs: StepInputs,
        labels: torch.Tensor,
        valid_rows: torch.Tensor | None,
    ) -> LossResult:
        """Return the loss inside the student head's own call; arguments as of `HeadForward`."""
        call = HeadForward(hidden, head, inputs, labels, valid_rows)
        return self.teacher.format.apply(self.loss, self.alignment, call)

    @torch.no_grad()
    def weights_of(self, call: HeadForward) -> WeightedTokens:
        """Return the weights of a micro-batch's tokens, inside the student head's own call."""
        weighting = self.weighting
        assert weighting is not None
        rows = call.trained_rows()
        arrays = batch_arrays(call.inputs.batch, rows, weighting.names)
        if weighting.reads_models:
            arrays |= self._model_arrays(call, rows)
        inputs = call.inputs
        return weighting.of(arrays, rows, call.labels.shape, inputs.num_items, inputs.weight_sum)

    def _model_arrays(self, call: HeadForward, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return log-probabilities of the labels and entropies of both models that the weights read, [n] each."""
        assert self.weighting is not None
        # Labels of one token have the student's figures from its own head; those of spans, of a teacher that reads
        # other tokens, are of both models' texts.
        of_student_alone = not self.weighting.reads_teacher and self.teacher.format.properties.labels_are_tokens
        if of_student_alone:
            loss = FusedDistillationLoss(
                [LossTerm("cross_entropy", 1.0)],
                student_logit_scale=self.alignment.student.scale,
                student_softcap=self.alignment.student.softcap,
            )
            arguments = self.alignment.arguments(call)
            _, found = loss(call.hidden, call.head.weight, labels=call.labels, return_stats=True, **arguments)
        else:
            held_out = self.held_out_loss()
            for each in single_losses(held_out):
                each.reverse = None  # its pass over the logits gives no more figures
            unweighted = call._replace(inputs=replace(call.inputs, statistics=True))
            _, found = self.teacher.format.apply(held_out, self.alignment, unweighted)
        statistics = dict(zip(STATISTICS, found, strict=False))
        sources = {
            "student_log_p": "student_label_logprob",
            "student_entropy": "student_entropy",
            "teacher_log_p": "teacher_label_logprob",
            "teacher_entropy": "teacher_entropy",
        }
        arrays = {}
        for name in self.weighting.names:
            if name in (*OF_STUDENT, *OF_TEACHER):
                values = statistics[sources[name]]
                # of aligned spans there is one number each, else one per position
                arrays[name] = values if len(values) == len(rows) else values[rows]
        return arrays

    def held_out_loss(self) -> TargetLoss:
        """Return the loss of evaluations: forward KL with its statistics, and the reverse KL."""
        return self.teacher.format.held_out(self.alignment)

    @property
    def needs_targets(self) -> bool:
        """True where the present loss or its weights need the teacher's targets; hard labels alone seldom do."""
        if self.weighting is not None and self.weighting.reads_teacher:
            return True
        return self.teacher.format.properties.needed_by_hard_labels or bool(self.loss.objective.needs_teacher)

    @property
    def terms(self) -> Sequence[LossTerm]:
        return self.loss.terms

    @property
    def measure(self) -> DivergenceUnit:
        return self.teacher.format.properties.measure

    @property
    def routes(self) -> tuple[str, ...]:
        """Routes of the teacher, whose own sums follow the statistics."""
        return self.teacher.format.properties.routes

    @property
    def routers(self) -> StudentRouters | None:
        """What is computed from the student's routers; None for a dense student."""
        return None if self.layers is None else self.layers.routers

    @property
    def columns(self) -> int:
        """Columns of the vocabulary that the loss is over."""
        return self.alignment.columns

    @property
    def divergence(self) -> tuple[str | None, float]:
        """Key of the statistics' `divergence`, `kl` or `divergence` (None: there is none), and its weight."""
        soft = soft_terms(measured_terms(self.loss))
        if not soft:
            return None, 1.0
        known = {term.type for term in soft} in KL
        return self.measure.key if known else "divergence", sum(term.weight for term in soft)

    @property
    def clips(self) -> bool:
        """Whether the statistics' divergence has caps in the loss."""
        return any(term.clip is not None for term in measured_terms(self.loss))

    def student_forward(
        self,
        student: nn.Module,
        step_inputs: StepInputs,
        labels: torch.Tensor,
        valid_rows: torch.Tensor | None = None,
        **inputs: Any,
    ) -> dict[str, torch.Tensor]:
        """The student's forward with the loss in place of logits.

        Returns `loss`, a scalar; if requested, `statistics`, fp32 sums over this batch's valid tokens in the order of
        `STATISTICS`; and for tokens that the student sampled `drawn` [4]: the sum of absolute differences between their
        log-probabilities now and when sampled, their number, the sum of `TargetFormat.overlap` over at most
        `COMPARED` trained tokens, and their number (0 where the overlap is not known). With several routes, the last
        two of each. With token weights, `token_weights` [4], the sums of `WeightedTokens`; statistics are then over the
        tokens of another weight than 0.
        """
        inputs = {key: value for key, value in inputs.items() if value is not None}
        # what PEFT passes along for the full forward
        for key in ("output_attentions", "output_hidden_states", "return_dict", "use_cache"):
            inputs.pop(key, None)
        decoder = decoder_of(student)
        layers = step_inputs.layers
        positions = inputs.get("position_ids")
        mask = inputs.get("attention_mask")
        with layers.record_student(positions, mask) if layers else nullcontext():
            hidden = decoder(**inputs, use_cache=False).last_hidden_state
        shifted = shift_labels(labels)
        of_routers: torch.Tensor | float = 0.0
        if layers is not None:
            of_routers = layers.router_loss(
                step_inputs.batch.get("content_mask", mask),
                count_trained_tokens(step_inputs.batch),
                step_inputs.num_items,
                statistics=step_inputs.statistics,
            )

        def compute(hidden: torch.Tensor, head: HeadWeights) -> dict[str, torch.Tensor]:
            step = step_inputs
            rows = valid_rows
            weighted = None
            with nullcontext() if self._watcher is None else self._watcher.phase("loss"):
                if step.weighted:
                    call = HeadForward(hidden, head, step, shifted, valid_rows)
                    # without them, rows would be chosen by their weights too
                    rows = call.trained_rows()
                    weighted = self.weights_of(call)
                    step = replace(step, token_weights=weighted.weights)
                result = self.loss_of(hidden, head, step, shifted, rows)
            if self._watcher is not None:
                self._watcher.loss_computed(step_inputs.batch, result)
            # the routers' losses, and a 0 for the gradients of projections that no term has used
            beside = 0.0 if layers is None else layers.unused() + of_routers
            figures = {} if weighted is None else {"token_weights": weighted.sums}
            if isinstance(result, torch.Tensor):
                return {"loss": result + beside, **figures}
            loss, stats = result
            every = torch.stack(tuple(stats))
            if weighted is not None:
                # the kernels skip a row of weight 0, but a stored teacher's entropy is there all the same
                counts = weighted.weights.flatten() != 0
                if every.shape[1] != len(counts):
                    counts = counts[rows]
                every = torch.where(counts, every, 0.0)
            output = {"loss": loss + beside, "statistics": every.sum(dim=1), **figures}
            drawn = step_inputs.sampled_log_p
            if drawn is not None:
                log_p = stats[STATISTICS.index("student_label_logprob")].detach()
                drawn = drawn.flatten()
                learned = shifted.flatten() != IGNORE_INDEX
                if weighted is not None:
                    learned &= weighted.weights.flatten() != 0
                if len(log_p) != len(drawn):  # of aligned spans, each with its label at its first token
                    if rows is None:
                        rows = learned.nonzero()[:, 0]
                    drawn = drawn[rows]
                    learned = learned[rows]
                gap = log_p - drawn
                known = learned & ~gap.isnan()
                shares: dict[str, torch.Tensor] = {}
                if valid_rows is not None:
                    sample = valid_rows[:: -(-len(valid_rows) // COMPARED) or 1]
                    call = HeadForward(hidden, head, step_inputs, shifted, valid_rows)
                    shares = self.teacher.format.overlap(self.alignment, call, sample)
                total = gap.abs().masked_fill(~known, 0.0).sum()
                nothing = gap.new_zeros(0)
                each = [shares.get(route, nothing) for route in self.routes or ("",)]
                sums = [figure for share in each for figure in (share.nansum(), (~share.isnan()).sum())]
                output["drawn"] = torch.stack((total, known.sum(), *sums))
            return output

        return call_head(find_head(student), hidden, compute)
