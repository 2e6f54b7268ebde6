"""Interface of what puts our forwards in the place of a model's: one kind each, none of which knows another.

    for swap in swaps:                  # layers that are offloaded, those of `patching.SWAPS`, fp8, the objective's
        apply_swap(model, swap)
    restore_swaps(model)                # those that `patch` made, the last one first
    restore_swaps(model, swap)          # or one of them

A model has its swaps in one list, in the order in which they were made, those last that are `outermost`. A later one on
a module calls the forward that it found there; where one is taken back or put in, those above it are put on again.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import nn

from distill.models.head import unwrap_peft
from distill.models.trial import Mismatch

Role = Literal["teacher", "student"]
SWAPPED = "_distill_swapped"  # of a bare model: its swaps, each with a module, in the order in which they were made
FORWARDS = "_distill_forwards"  # of a module: the forwards that ours took the place of; None for its class's
OTHER = ""  # reason of a swap for a module that is not of its kind
EPSILONS = ("variance_epsilon", "eps", "epsilon")  # names of a norm's epsilon


@dataclass
class PatchReport:
    """Result of `patch`.

    Attributes:
        model_type: The configuration's model type.
        swapped: Number of modules of each kind that use our kernels now.
        left: Class names that looked alike but compute something else, with the reason.
        attention: Back end in use, or None where the model kept its own attention.
        loss: Whether a call with labels computes the fused loss and no logits.
        trial_results: Findings on each kind of module, for a model of the same parts without weights.
    """

    model_type: str
    swapped: Counter[str] = field(default_factory=Counter)
    left: dict[str, str] = field(default_factory=dict)
    attention: str | None = None
    loss: bool = False
    trial_results: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        parts = [f"{count} {kind}" for kind, count in self.swapped.items()]
        if self.attention:
            parts.append(f"attention {self.attention}")
        parts += ["loss"] if self.loss else []
        text = f"{self.model_type}: {', '.join(parts) or 'nothing swapped'}"
        if self.left:
            text += "; left as they are: " + ", ".join(f"{name} ({reason})" for name, reason in self.left.items())
        return text


class Swap:
    """One kind of replacement.

    Attributes:
        kind: Name in the report.
        survives_unpatch: True for one that decides where or for what a module computes, not by which kernels.
        outermost: True for one that has to see a call before others of its module, in whatever order they are made.
    """

    kind: str
    survives_unpatch = False
    outermost = False

    def applies(self, module: nn.Module) -> str | None:
        """Return why a module is left as it is: `OTHER` for one of another kind; None where `swap` may be called."""
        raise NotImplementedError

    def swap(self, module: nn.Module) -> None:
        raise NotImplementedError

    def restore(self, module: nn.Module) -> None:
        restore_forward(module)


class ModulePattern(NamedTuple):
    """Kind of module that we know; a call returns its swap.

    Attributes:
        name: Name in the report.
        candidate: Function that returns whether a module looks like one.
        forward: Function that returns our forward of a module of a form.
        form: Function that runs a candidate, with gradients or without, and returns its form or a `Mismatch`; None
            where the class alone tells.
    """

    name: str
    candidate: Callable[[Any], object]
    forward: Callable[[Any, Any], Callable[..., Any]]
    form: Callable[..., Any] | None = None

    def __call__(self, model: nn.Module, role: Role, report: PatchReport) -> RecognisedSwap:
        """Return the swap of a model's modules of this kind; arguments as of `RecognisedSwap`."""
        return RecognisedSwap(model, role, report, self)


class RecognisedSwap(Swap):
    """Swap of modules of a kind, which are run to find the form of them that we know.

    Args:
        model: Bare model that is patched.
        role: Role of the model in training; gradients are compared of a student only.
        report: Report of `patch`, with its verdicts.
        kind: Kind of module.
    """

    def __init__(self, model: nn.Module, role: Role, report: PatchReport, kind: ModulePattern) -> None:
        self.model = model
        self.gradients = role == "student"
        self.report = report
        self.kind = kind.name
        self.of = kind

    def applies(self, module: nn.Module) -> str | None:
        if not self.of.candidate(module) or self.of.form is None:
            return None if self.of.candidate(module) else OTHER
        verdicts = self.report.trial_results
        key = self._key(module)
        if key not in verdicts:
            if any(parameter.is_meta for parameter in module.parameters()):
                return "no verdict on it, and no weights to try"
            verdicts[key] = self.of.form(module, model=self.model, gradients=self.gradients)
        verdict = verdicts[key]
        return f"not a {self.kind} of ours: {verdict.reason}" if isinstance(verdict, Mismatch) else None

    def swap(self, module: nn.Module) -> None:
        replace_forward(module, self.of.forward(module, self.report.trial_results.get(self._key(module))))

    def _key(self, module: nn.Module) -> object:
        # modules of one class with the same shapes and settings get one verdict
        shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())
        return self.kind, type(module), shapes, epsilon_of(module)


def epsilon_of(module: nn.Module) -> float | None:
    for name in EPSILONS:
        if isinstance(value := getattr(module, name, None), float):
            return value
    return None


def apply_swap(model: nn.Module, swap: Swap) -> int:
    """Swap the modules of a model, bare or inside PEFT, that a swap applies to, and return how many."""
    count = 0
    for module in list(model.modules()):
        if swap.applies(module) is None:
            swap_module(model, swap, module)
            count += 1
    return count


def swap_module(model: nn.Module, swap: Swap, module: nn.Module) -> None:
    """Swap a module that a swap applies to, beneath those that are outermost."""
    made: list[tuple[Swap, nn.Module]] = unwrap_peft(model).__dict__.setdefault(SWAPPED, [])
    above = [] if swap.outermost else [other for other, of in made if of is module and other.outermost]
    for other in reversed(above):
        other.restore(module)
    swap.swap(module)
    for other in above:
        other.swap(module)
    made.insert(made.index((above[0], module)) if above else len(made), (swap, module))


def is_patched(model: nn.Module) -> bool:
    return any(not swap.survives_unpatch for swap, _ in unwrap_peft(model).__dict__.get(SWAPPED, ()))


def restore_swaps(model: nn.Module, only: Swap | None = None) -> None:
    """Take back swaps of a model, the last one first; nothing where there are none.

    Args:
        model: Model, bare or inside PEFT.
        only: The swap to take back; None for those that do not survive `unpatch`.
    """
    made: list[tuple[Swap, nn.Module]] = unwrap_peft(model).__dict__.pop(SWAPPED, [])
    kept = [(swap, module) for swap, module in made if (swap is not only if only else swap.survives_unpatch)]
    touched = {module for swap, module in made if (swap, module) not in kept}
    for swap, module in reversed(made):
        if module in touched:
            swap.restore(module)
    for swap, module in kept:
        if module in touched:
            swap.swap(module)
    if kept:
        unwrap_peft(model).__dict__[SWAPPED] = kept


def forget_module(model: nn.Module, module: nn.Module) -> None:
    """Take back all swaps of a module that is about to leave its model, whose list would keep its weights otherwise."""
    made: list[tuple[Swap, nn.Module]] = unwrap_peft(model).__dict__.get(SWAPPED, [])
    for swap, of in reversed(made):
        if of is module:
            swap.restore(module)
    made[:] = [(swap, of) for swap, of in made if of is not module]


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give a module a forward of ours; `restore_forward` gives it back the one it had."""
    module.__dict__.setdefault(FORWARDS, []).append(module.__dict__.get("forward"))
    module.forward = types.MethodType(forward, module)


def restore_forward(module: nn.Module) -> None:
    """Give a module back the forward that the last `replace_forward` took the place of."""
    before = module.__dict__[FORWARDS].pop()
    if not module.__dict__[FORWARDS]:
        del module.__dict__[FORWARDS]
    del module.forward
    if before is not None:
        module.forward = before


def forward_attribute(module: nn.Module, name: str) -> Any:
    """Return an attribute that a swap gave to the forward that a module runs; None without it."""
    return getattr(getattr(module.__dict__.get("forward"), "__func__", None), name, None)
