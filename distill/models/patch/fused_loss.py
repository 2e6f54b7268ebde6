"""The loss inside a model's own forward: called with `labels`, it computes a fused cross-entropy and no logits.

The model's forward runs as it is; for that one call its head hands out logits of no columns and computes the loss in
their place, inside its own call (where FSDP2 has gathered its weight), and its loss function returns that loss. What
else a forward does with its outputs (a router's loss, hidden states) goes on. `outputs.logits` are computed from the
last hidden states when somebody uses them.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from distill_kernels import FusedCrossEntropyLoss
from distill_kernels.torch_internals import map_nested
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import ModelOutput

from distill.core.errors import first_line
from distill.core.labels import IGNORE_INDEX, shift_labels
from distill.models.head import LogitTransform, StudentHead, find_head, probe_logits, read_head, unfusable_reason
from distill.models.patch.swaps import Swap, replace_forward

log = logging.getLogger(__name__)

# answered without the logits; functions, since `shape` and the like reach a tensor's subclass as their getters
_KNOWN = {
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "layout",
        "requires_grad",
        "grad_fn",
        "grad",
        "is_leaf",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "is_nested",
        "ndim",
        "_backward_hooks",
    )
} | {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.ndimension,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.is_floating_point,
    torch.is_floating_point,
    torch.Tensor.get_device,
    torch.Tensor.__len__,
    torch.Tensor.element_size,
    torch.Tensor.is_complex,
    torch.is_complex,
}
_CASTS = {torch.Tensor.float: torch.float32, torch.Tensor.bfloat16: torch.bfloat16, torch.Tensor.half: torch.float16}


@dataclass
class _Source:
    """Inputs of a forward's logits, once with a graph and once detached."""

    model: nn.Module
    hidden: torch.Tensor
    transform: LogitTransform
    autocast: torch.dtype | None
    columns: int
    versions: list[int]
    logged: set[str]
    logits: dict[bool, torch.Tensor] = field(default_factory=dict)

    def compute(self) -> torch.Tensor:
        graph = torch.is_grad_enabled() and self.hidden.requires_grad
        if graph not in self.logits:
            head = find_head(self.model)
            self._check(head)
            shape = [*self.hidden.shape[:-1], self.columns]
            line = "outputs.logits are used: %s of them are computed, which the loss did not"
            log_once(self.logged, "logits", line, shape)
            kind = self.hidden.device.type
            with torch.autocast(kind, self.autocast, enabled=self.autocast is not None):
                self.logits[graph] = self.transform.applied(head.module(self.hidden))
        return self.logits[graph]

    def _check(self, head: StudentHead) -> None:
        weight: Any = head.linear.weight
        cut = isinstance(weight, DTensor) or weight.shape[0] != self.columns
        if cut or weight.untyped_storage().size() == 0:
            raise RuntimeError(
                "outputs.logits: not computed where the head's weight is sharded (FSDP), since not all processes need "
                "come here; patch the model with keep_logits=True, or call it without labels"
            )
        if _versions(head) != self.versions:
            raise RuntimeError(
                "outputs.logits: the head's weight has changed since this forward; use them before the optimizer's "
                "step, or patch the model with keep_logits=True"
            )


class LazyLogits(torch.Tensor):
    """Logits [B, S, V] that are computed when their values are used; of the dtype that the model's own would have.

    They belong to the graph of the forward, where gradients are enabled when they are used.
    """

    source: _Source
    without_graph: bool

    @staticmethod
    def __new__(cls, source: _Source, dtype: torch.dtype, without_graph: bool = False) -> LazyLogits:
        shape = (*source.hidden.shape[:-1], source.columns)
        logits = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=source.hidden.device)
        logits.source = source
        logits.without_graph = without_graph
        return logits

    def computed(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            logits = self.source.compute()
            return (logits.detach() if self.without_graph else logits).to(self.dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        kinds: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
        if args and isinstance(args[0], LazyLogits) and not kwargs:  # accelerate casts outputs, Trainer detaches them
            logits = args[0]
            others = args[1:]
            if func is torch.Tensor.detach:
                return LazyLogits(logits.source, logits.dtype, True)
            if func in _CASTS:
                return LazyLogits(logits.source, _CASTS[func], logits.without_graph)
            if func is torch.Tensor.to and len(others) == 1 and isinstance(others[0], torch.dtype):
                return LazyLogits(logits.source, others[0], logits.without_graph)
        args, kwargs = map_nested(_computed, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., object],
        kinds: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        args, kwargs = map_nested(_computed, (args, kwargs or {}))
        return func(*args, **kwargs)


def _computed(value: object) -> object:
    return value.computed() if isinstance(value, LazyLogits) else value


class FusedLoss:
    """The loss of one model, and what stands in for its head and its loss function while it is computed.

    Args:
        transform: Scale and soft cap between the head's product and the model's logits.
    """

    def __init__(self, transform: LogitTransform) -> None:
        self.transform = transform
        self.losses: dict[int, FusedCrossEntropyLoss] = {}
        self.logged: set[str] = set()
        # one object each: torch.compile looks whether a forward is the one it knows
        self._stand_ins = types.MethodType(FusedLoss._head, self), types.MethodType(FusedLoss._loss_function, self)
        self._head_of_call: StudentHead | None = None
        self._labels: torch.Tensor | None = None
        self._num_items: torch.Tensor | int | None = None
        self._loss: torch.Tensor | None = None
        self._hidden: torch.Tensor | None = None
        self._ignored = IGNORE_INDEX

    def forward(self, model: PreTrainedModel, original: Callable[..., object], inputs: dict[str, Any]) -> Any:
        if inputs.get("labels") is None:
            return original(**inputs)
        if inputs.get("use_cache") is None:  # what learns or measures continues nothing
            inputs["use_cache"] = False
        head = find_head(model)
        reason = self._why_not(model, head, inputs)
        if reason is not None:
            log_once(self.logged, reason, "the loss is computed by the model itself, from logits: %s", reason)
            return original(**inputs)
        ignored = inputs.get("ignore_index", IGNORE_INDEX)
        labels = inputs.get("shift_labels")
        if labels is None:
            labels = shift_labels(inputs["labels"], ignored)
        self._head_of_call = head
        self._labels = labels
        self._ignored = ignored
        self._num_items = inputs.get("num_items_in_batch")
        self._loss = None
        if ignored not in self.losses:
            self.losses[ignored] = FusedCrossEntropyLoss(
                ignore_index=ignored, student_logit_scale=self.transform.scale, student_softcap=self.transform.softcap
            )
        owner = head.owner
        own_forward = head.owner.__dict__.get("forward")
        own_loss = model.__dict__.get("_loss_function")
        owner.forward, model.loss_function = self._stand_ins
        try:
            output = original(**inputs)
            hidden = self._hidden
            used = self._loss is None
        finally:
            owner.__dict__.pop("forward")
            if own_forward is not None:
                owner.forward = own_forward
            model.__dict__.pop("_loss_function")
            if own_loss is not None:
                model.loss_function = own_loss
            self._head_of_call = self._labels = self._num_items = self._loss = self._hidden = None
        if not used or hidden is None:
            raise RuntimeError(
                f"{type(model).__name__}: its forward did not compute the loss; keep_logits=True leaves it"
            )
        return self._with_logits(output, model, head, hidden)

    def _why_not(self, model: PreTrainedModel, head: StudentHead, inputs: dict[str, object]) -> str | None:
        if model.loss_function is not ForCausalLMLoss:
            return "the model has a loss function of its own"
        if hasattr(head.module, "_hf_hook") or hasattr(head.owner, "_hf_hook"):
            return "the head is dispatched or offloaded by accelerate"
        if not isinstance(inputs.get("logits_to_keep", 0), int) or inputs.get("logits_to_keep", 0) != 0:
            return "logits_to_keep was given"
        return unfusable_reason(head)

    def _head(self, hidden: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        assert self._head_of_call is not None and self._labels is not None
        weight, bias, lora = read_head(self._head_of_call)
        num_items = self._num_items
        if isinstance(num_items, torch.Tensor):
            num_items = num_items.to(hidden.device)
        if not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(weight.dtype)
        self._loss = self.losses[self._ignored](
            hidden,
            weight,
            labels=self._labels.to(hidden.device),
            student_bias=bias,
            student_lora=lora,
            num_items=num_items,
        )
        self._hidden = hidden
        return hidden.new_empty((*hidden.shape[:-1], 0))

    def _loss_function(self, *_: object, **__: object) -> torch.Tensor | None:
        loss = self._loss
        self._loss = None
        return loss

    def _with_logits(self, output: object, model: nn.Module, head: StudentHead, hidden: torch.Tensor) -> object:
        kind = hidden.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        columns: int = head.linear.out_features  # type: ignore[assignment]
        source = _Source(model, hidden, self.transform, autocast, columns, _versions(head), self.logged)
        logits = LazyLogits(source, hidden.dtype if autocast is None else autocast)
        if isinstance(output, ModelOutput):
            output["logits"] = logits
            return output
        assert isinstance(output, tuple)  # as return_dict=False has them
        return (output[0], logits, *output[2:])


def _versions(head: StudentHead) -> list[int]:
    """Counts the changes in place of all that the head's product depends on."""
    return [p._version for p in head.module.parameters() if not p.is_inference()]


def log_once(logged: set[str], key: str, message: str, *values: object) -> None:
    if key not in logged:
        logged.add(key)
        log.warning(message, *values)


class FusedLosses(Swap):
    """Swap of a model's own loss for one without logits."""

    kind = "loss"
    fused: FusedLoss | None = None

    def applies(self, module: PreTrainedModel) -> str | None:  # type: ignore[override]
        if any(parameter.is_meta for parameter in module.parameters()):
            return "no weights to try it on"
        try:
            self.fused = FusedLoss(probe_logits(module, "model"))
        except ValueError as error:
            return str(error)
        return _differs(module, self.fused)

    def swap(self, module: nn.Module) -> None:
        fused = self.fused
        before = module.__dict__.get("forward")
        assert fused is not None
        names = list(inspect.signature(type(module).forward).parameters)[1:]

        @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]  # what it calls is compiled
        def forward(self: PreTrainedModel, *args: object, **kwargs: object) -> object:
            original = before or types.MethodType(type(self).forward, self)
            return fused.forward(self, original, dict(zip(names, args, strict=False)) | kwargs)

        replace_forward(module, functools.wraps(type(module).forward)(forward))


@torch.no_grad()
def _differs(model: PreTrainedModel, fused: FusedLoss) -> str | None:
    """Return how the fused loss differs from the model's own on four tokens; None where it does not."""
    weight = find_head(model).linear.weight
    ids = torch.arange(4, device=weight.device)[None] % weight.shape[0]  # type: ignore[arg-type,index]
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    own = model.forward(**inputs).loss.item()
    try:
        ours = fused.forward(model, model.forward, inputs).loss.item()
    except (RuntimeError, TypeError, ValueError, IndexError) as error:  # a forward of another make
        return first_line(error)
    close = abs(ours - own) <= 8 * torch.finfo(weight.dtype).eps * max(abs(own), 1.0)  # type: ignore[arg-type]
    return None if close else f"it is {ours:.6g}, and the model's own loss {own:.6g}"
