"""A loss term of one's own in a run: `distill run recipe.yaml --plugin my_losses.py`.

    # my_losses.py
    def hinge(student_logits, teacher_logits, labels):          # fp32 [n, V], fp32 [n, V], int64 [n]
        gap = (teacher_logits.log_softmax(-1) - student_logits.log_softmax(-1)).clamp_min(0)
        return gap.sum(-1)                                       # [n]

    TERMS = {"hinge": hinge}

    # recipe.yaml
    loss: {terms: [{type: forward_kl, weight: 0.5}, {type: hinge, weight: 0.5}]}

The functions get the logits as the models make them (scale and soft cap applied, no temperature, cut to the shared
vocabulary) in chunks of rows, so that the logits of a batch never exist together; autograd makes their gradients chunk
by chunk. They are summed with the recipe's other terms, over the same tokens and the same count.

`--plugin` is the only way that a run executes code of its user: a recipe alone never does. The file's hash is part of
the resolved recipe, so that a run is not resumed with other code.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from distill_kernels import ChunkedLoss, LossTerm
from torch import nn

from distill.models.head import HeadWeights, LogitShape, find_head, whole
from distill.recipe.loss import Loss, PlainTerm, PluginTerm
from distill.teachers.objective import IGNORE, KL, Comparison, DistillationObjective

RowLosses = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Plugin(NamedTuple):
    """What a plugin's file defines: its loss functions by name, and the SHA-256 of its bytes."""

    terms: dict[str, RowLosses]
    sha256: str


def load_plugin(path: Path) -> Plugin:
    """Run a plugin's file and take its `TERMS`.

    Raises:
        ValueError: it cannot be read, raises, or has no such dict of functions.
    """
    try:
        code = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"--plugin {path}: cannot be read: {error.strerror}") from None
    module = types.ModuleType("distill_plugin")
    module.__file__ = str(path)
    try:
        exec(compile(code, str(path), "exec"), module.__dict__)
    except Exception as error:  # whatever the user's own code raises
        raise ValueError(f"--plugin {path}: {type(error).__name__}: {error}") from error
    terms = getattr(module, "TERMS", None)
    if (
        not isinstance(terms, dict)
        or not terms
        or not all(isinstance(n, str) and callable(f) for n, f in terms.items())
    ):
        raise ValueError(
            f"--plugin {path}: expected TERMS, a dict of functions by name, as in TERMS = {{'mine': mine}}"
        )
    return Plugin(dict(terms), hashlib.sha256(code).hexdigest())


def allowed_plugin(loss: Loss, path: Path | None) -> Plugin | None:
    """The plugin that a recipe's loss needs, loaded only where it was allowed by `--plugin`.

    Args:
        loss: The recipe's, whose `plugin` says which file it was resolved with.
        path: What `--plugin` named.

    Raises:
        ValueError: a recipe with code in it and no `--plugin`, another file, or a term that the file does not define.
    """
    if loss.plugin is None:
        if path is not None:
            raise ValueError(f"--plugin {path}: the recipe was not resolved with it")
        return None
    if path is None:
        raise ValueError(
            f"loss.plugin: this recipe runs code, from {loss.plugin.file}; allow it with --plugin {loss.plugin.file}"
        )
    plugin = load_plugin(path)
    if plugin.sha256 != loss.plugin.sha256:
        raise ValueError(f"--plugin {path}: expected the file with SHA-256 {loss.plugin.sha256}, came {plugin.sha256}")
    for term in loss.terms:
        if isinstance(term, PluginTerm) and term.function not in plugin.terms:
            raise ValueError(
                f"loss.terms: neither a type of ours nor in {path}: {term.function!r}; it defines "
                f"{', '.join(sorted(plugin.terms))}"
            )
    return plugin


class PluginObjective(DistillationObjective):
    """The fused terms of a loss, and functions over logits beside them.

    Args:
        teacher, student, loss, vocab_size: As of `DistillationObjective`; `loss` is a recipe's.
        functions: By the name that terms call them.
    """

    def __init__(
        self,
        teacher: nn.Module | None,
        student: nn.Module,
        loss: Any,
        *,
        vocab_size: int | None = None,
        functions: Mapping[str, RowLosses],
    ) -> None:
        own = [term for term in loss.terms if isinstance(term, PluginTerm) and term.weight > 0]
        fused = [term for term in loss.terms if not isinstance(term, PluginTerm) and term.weight > 0]
        self.is_alone = not fused  # then the fused pass is for the statistics
        fused = fused or [PlainTerm(type="forward_kl")]
        super().__init__(
            teacher, student, loss.model_copy(update={"terms": fused, "plugin": None}), vocab_size=vocab_size
        )
        self._fused = self.loss
        self.own = [
            (term, ChunkedLoss(_with_shapes(functions[term.function], self.reading.student, self.reading.teacher)))
            for term in own
        ]

    @property
    def terms(self) -> Sequence[LossTerm]:
        """Of the loss, the functions under their names."""
        fused = () if self.is_alone else self._fused.terms
        return [*fused, *(LossTerm(term.function, term.weight) for term, _ in self.own)]

    @property
    def divergence(self) -> tuple[str | None, float]:
        """Of the fused terms; forward KL, for the figures alone, where there are none."""
        soft = [term for term in self._fused.terms if term.type != "cross_entropy"]
        if not soft:
            return None, 1.0
        return "kl" if {term.type for term in soft} in KL else "divergence", sum(term.weight for term in soft)

    def signal(self, inputs: Mapping[str, Any]) -> Any:
        """The teacher's last hidden states, which the functions need even where no fused term does."""
        return self.teacher_hidden(inputs)

    def loss_of(
        self,
        hidden: torch.Tensor,
        head: HeadWeights,
        comparison: Comparison,
        labels: torch.Tensor,
        valid_rows: torch.Tensor | None,
    ) -> Any:
        """The fused loss plus the functions' sums, inside the student head's own call."""
        if self.loss is not self._fused:  # an evaluation that measures something else
            return super().loss_of(hidden, head, comparison, labels, valid_rows)
        statistics: Any = None
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        if comparison.statistics or not self.is_alone:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.is_alone):
                fused = super().loss_of(hidden, head, comparison, labels, valid_rows)
            fused, statistics = fused if comparison.statistics else (fused, None)
            total = total if self.is_alone else fused
        with whole(find_head(self.teacher)) as teacher:
            for term, chunked in self.own:
                total = total + term.weight * chunked(
                    hidden, head.weight, comparison.signal, teacher.weight, labels,
                    student_bias=head.bias, teacher_bias=teacher.bias, student_lora=head.lora,
                    num_items=comparison.num_items, valid_rows=valid_rows, vocab_size=self.reading.vocab_size,
                )  # fmt: skip
        return (total, statistics) if comparison.statistics else total


def _with_shapes(function: RowLosses, student: LogitShape, teacher: LogitShape) -> Callable[..., torch.Tensor]:
    """`function` of what the heads make, after each model's own scale and soft cap."""

    def shaped(logits: torch.Tensor, shape: LogitShape) -> torch.Tensor:
        logits = logits * shape.scale if shape.scale != 1.0 else logits
        return logits if shape.softcap is None else shape.softcap * torch.tanh(logits / shape.softcap)

    def of_raw(raw: torch.Tensor, teacher_raw: Any, labels: Any) -> torch.Tensor:
        losses = function(shaped(raw, student), shaped(teacher_raw, teacher), labels)
        return torch.where(labels == IGNORE, 0.0, losses) if labels is not None else losses

    return of_raw
