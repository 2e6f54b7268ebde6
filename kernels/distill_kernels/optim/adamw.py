"""AdamW for all parameters of a group in one launch; a drop-in for `torch.optim.AdamW`.

Launches a step: one, and one more that sums the gradients' squares when clipping or checking; per group, and per set of
dtypes within a group. Nothing waits for the host: step numbers, norm, clipping factor and finite check stay on the
device. The formulas are in adamw_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch

from distill_kernels.optim.adamw_kernels import StepControls, UpdateOptions, update, update_by_reference
from distill_kernels.optim.multi_tensor import Member, UpdatePlan, squares_over_ranks

BLOCK = 2048
NO_AMSGRAD = "amsgrad: expected False (FusedAdamW has no AMSGrad form)"


class FusedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with one launch a group, optional stochastic rounding, fp32 masters and built-in clipping.

    A drop-in: `state_dict` has the keys, shapes and step tensors of `torch.optim.AdamW(fused=True)`, and either loads
    the other's (a `master` tensor beside the moments where `master_weights` is on). Parameters may be plain tensors or
    DTensors (FSDP2), whose local shards are updated; norms are then summed over the ranks that share a parameter.
    CUDA tensors of float32, bfloat16 or float16 go to the kernel; CPU tensors, other dtypes and tensors with holes
    to the reference.

    Args:
        params: Parameters or groups, as for any torch optimizer.
        lr: Learning rate; a float, or a scalar tensor (read on its device).
        betas: Decay of the first and second moment, each in [0, 1).
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay a step, times `lr`.
        amsgrad: Only False; kept so that calls written for `torch.optim.AdamW` work.
        maximize: Ascend instead of descend.
        state_dtype: dtype of both moments; None takes the parameter's.
        stochastic_rounding: Round bf16 parameters and bf16 second moments at random, right on average. Without it
            updates below half of bf16's spacing (0.2-0.4 % of a weight) are lost, and a bf16 second moment
            with beta2 = 0.999 cannot decay. Bit for bit reproducible from `seed` and the step number.
        master_weights: Keep an fp32 copy of each bf16 or fp16 parameter in the state; the parameter is its rounding.
        max_grad_norm: Scale gradients so that the norm over all groups (and ranks) is at most this; None: off.
        skip_nonfinite: Leave parameters, states and step number as they are where any gradient is inf or NaN.
        seed: Seed of the stochastic rounding; the same on every rank.

    Attributes:
        grad_norm: fp32 scalar on the device, the norm before clipping at the last step; None where not computed.

    Raises:
        ValueError: For an argument outside its range, for complex parameters, and for sparse gradients.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        master_weights: bool = False,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        seed: int = 0,
    ) -> None:
        if amsgrad:
            raise ValueError(f"{NO_AMSGRAD}, got True")
        if state_dtype not in (None, torch.float32, torch.bfloat16):
            raise ValueError(f"state_dtype: expected None, torch.float32 or torch.bfloat16, got {state_dtype}")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm: expected a positive number or None, got {max_grad_norm}")
        if not 0 <= seed < 2**63:
            raise ValueError(f"seed: expected an integer in [0, 2^63), got {seed}")
        self.options = UpdateOptions(
            state_dtype, stochastic_rounding, master_weights, max_grad_norm, skip_nonfinite, seed
        )
        self.grad_norm: torch.Tensor | None = None
        self._plans: dict[int, UpdatePlan] = {}
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, fused=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own, as any torch optimizer does."""
        if isinstance(param_group, dict) and param_group.get("amsgrad"):
            raise ValueError(f"{NO_AMSGRAD}, got a group with True")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        number = 0
        buckets = []
        meshes = dict[Any, None]()
        for index, group in enumerate(self.param_groups):
            plan = self._plans.get(index)
            if plan is None or not plan.holds(group["params"], self.state):
                self._plans.pop(index, None)
                plan = self._plans[index] = self._plan(group["params"], number)
            number += len(group["params"])
            meshes.update(plan.meshes)
            buckets += [(group, bucket) for bucket in plan.buckets]
        grad_scale = getattr(self, "grad_scale", None)
        squares = None
        if self.options.max_grad_norm is not None or self.options.skip_nonfinite:
            squares = squares_over_ranks([bucket for _, bucket in buckets], meshes)
            self.grad_norm = None if squares is None else squares.sqrt()
            if squares is not None and grad_scale is not None:
                self.grad_norm = squares.sqrt() / grad_scale
        controls = StepControls(squares, grad_scale, getattr(self, "found_inf", None))
        for group, bucket in buckets:
            apply = update if bucket.key.on_triton else update_by_reference
            apply(bucket, group, self.options, controls)
        return loss

    @torch.no_grad()
    def _plan(self, params: Sequence[torch.Tensor], number: int) -> UpdatePlan:
        """Return the plan of the parameters with a gradient, numbered from `number`; missing states are created."""
        members = []
        for p in params:
            if p.grad is not None:
                if p.grad.is_sparse:
                    raise ValueError(f"params: expected dense gradients, got a sparse one of shape {tuple(p.shape)}")
                if not p.is_floating_point():
                    raise ValueError(f"params: expected floating-point parameters, got {p.dtype} {tuple(p.shape)}")
                state = self.state[p]
                if not state:
                    dtype = self.options.state_dtype or p.dtype
                    state["step"] = torch.zeros((), device=p.device)
                    state["exp_avg"] = torch.zeros_like(p, dtype=dtype)
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=dtype)
                if self.options.master_weights and "master" not in state and p.dtype in (torch.bfloat16, torch.float16):
                    state["master"] = p.detach().float()
                members.append(Member(number, p, state))
            number += 1
        return UpdatePlan(members, BLOCK)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of `torch.optim.AdamW`; moments keep the dtype that this optimizer gives them.

        Torch casts floating state to the parameter's dtype on loading, which would round fp32 moments and masters of
        bf16 parameters; they are therefore taken from `state_dict` again, as pre-hooks have left it.
        """
        taken = [state_dict]
        last = self.register_load_state_dict_pre_hook(lambda _, given: taken.append(given))
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
        state_dict = taken[-1]
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        owned = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, p in zip(saved, owned, strict=True):
            state = self.state.get(p, {})
            for name in ("exp_avg", "exp_avg_sq", "master"):
                if name in state:
                    dtype = torch.float32 if name == "master" else (self.options.state_dtype or p.dtype)
                    state[name] = torch.empty_like(p, dtype=dtype).copy_(state_dict["state"][index][name])
            if "step" in state:
                state["step"] = state["step"].clone()  # which torch would share with the optimizer it came from
            if not self.options.master_weights:
                state.pop("master", None)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plans = {}
        self.grad_norm = None
        for group in self.param_groups:
            if group["amsgrad"]:
                raise ValueError(f"{NO_AMSGRAD}, got a state with True")
