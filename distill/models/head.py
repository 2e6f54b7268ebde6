"""Head of a causal language model: the computation from hidden states to logits, verified on the model itself.

A fused loss never sees logits, so it must be told all that happens on the way to them: weight, bias, a LoRA on the
head, a scale (Granite divides, Cohere multiplies), a soft cap (Gemma). `read_head` says what the head's modules hold
now; `probe_logits` runs the model on a few tokens once and keeps the scale and cap that reproduce its own logits, so
that a model with a twist nobody told us about is refused instead of being trained silently wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from distill_kernels import call_inside
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from distill.core.eval_mode import eval_mode
from distill.models.names import LOGIT_SCALES, SOFT_CAPS
from distill.models.trial import LOGIT_ROUNDINGS

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class StudentHead(NamedTuple):
    """The modules of an LM head.

    Attributes:
        module: Module that the model calls; calling it fires the hooks of every wrapper around the head.
        owner: The last module called on the way: PEFT's LoRA layer if there is one, else `linear`.
        linear: The `nn.Linear` that owns weight and bias.
    """

    module: nn.Module
    owner: nn.Module
    linear: nn.Module


class HeadWeights(NamedTuple):
    """Weights of a head, as a fused loss needs them.

    Attributes:
        weight: [vocabulary, hidden], floating point, not sharded.
        bias: [vocabulary] or None.
        lora: `(A [r, hidden], B [vocabulary, r], scale)` of an active LoRA on the head, or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    lora: tuple[torch.Tensor, torch.Tensor, float] | None


ALIGNMENT = 64  # bytes, at which PyTorch begins its own memory


def aligned_head_weight(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory begins at a multiple of 64 bytes, on the CPU: the same, or a copy.

    Weights that are mapped from a file begin wherever that file has them, and a product of one row with such a matrix
    adds up in another order: the same weights then give other last bits in one file than in another.
    """
    return tensor.clone() if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT else tensor


def align_head(model: nn.Module) -> None:
    """Move the weights of a model's head to where `aligned_head_weight` has them; in place, ties stay."""
    for parameter in find_head(model).linear.parameters(recurse=False):
        if type(parameter.data) is torch.Tensor:  # no part of one that is sharded
            parameter.data = aligned_head_weight(parameter.data)


class LogitTransform(NamedTuple):
    """Transformation of the head's output to logits: `softcap * tanh(scale * x / softcap)`, no cap if None."""

    scale: float = 1.0
    softcap: float | None = None

    def applied(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits * self.scale if self.scale != 1.0 else logits
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def unwrap_peft(model: nn.Module) -> nn.Module:
    """The transformers model inside PEFT's wrappers; the model itself where there are none."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def attention_sizes(config: Any) -> tuple[int, int, int]:
    """Return heads of queries, of keys and values, and a head's width; zeros for a model without attention.

    Where layers differ (transformers' `per_layer_config`, whose fields the whole configuration refuses to tell), those
    of the layer with the most columns of queries.
    """
    if getattr(config, "_heterogeneity_spec", None) is not None:
        return max((attention_sizes(layer) for layer in config.per_layer_config), key=lambda sizes: sizes[0] * sizes[2])
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        return 0, 0, 0
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, width


def decoder_of(model: nn.Module) -> nn.Module:
    """The body of a causal language model: its `__call__` returns the hidden states that the head takes."""
    model = unwrap_peft(model)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None  # type: ignore[operator]
    if decoder is model or isinstance(decoder, nn.Linear):  # transformers goes by names (Llama 4, ModernBERT's decoder)
        decoder = getattr(model, "model", None)
    if decoder is None or decoder is model:
        raise ValueError(f"model: expected a causal language model with a decoder and a head, got {_name(model)}")
    return decoder


def find_head(model: nn.Module) -> StudentHead:
    """Find the LM head of `model` (a transformers model, or one inside PEFT); its weights may be sharded.

    Raises:
        ValueError: where the model has no head.
    """
    module = unwrap_peft(model).get_output_embeddings()  # type: ignore[operator]
    if module is None:
        raise ValueError(
            f"model: {_name(unwrap_peft(model))} has no output embeddings, so there are no logits to match"
        )
    owner = module
    if hasattr(owner, "modules_to_save") and hasattr(owner, "original_module"):
        # PEFT keeps a trained copy of the whole head beside the original
        active = owner.active_adapters
        owner = owner.modules_to_save[active[0]] if active and not owner.disable_adapters else owner.original_module
    return StudentHead(module, owner, owner.get_base_layer() if _is_lora(owner) else owner)


def read_head(head: StudentHead) -> HeadWeights:
    """Read the weights of a head as they stand now.

    Raises:
        ValueError: for a head that a fused loss would read wrongly: quantised, not linear, with DoRA, with dropout
            on its LoRA, with several adapters, or a bare sharded weight.
    """
    linear: Any = head.linear
    _expect_linear(linear)
    weight = linear.weight
    if isinstance(weight, DTensor):
        raise ValueError(
            "lm_head.weight is sharded (a DTensor) where the loss needs it whole; compute the loss through "
            "distill.models.head.call_head, so that the head's own wrapper gathers the weight"
        )
    if weight.dtype not in FLOATS or type(weight) not in (nn.Parameter, torch.Tensor):
        raise ValueError(
            f"lm_head.weight: expected float32, bfloat16 or float16, got {type(weight).__name__} of {weight.dtype}; "
            "a quantised head is not supported: leave the head out of quantisation"
        )
    return HeadWeights(weight, linear.bias, _read_lora(head.owner) if _is_lora(head.owner) else None)


def unfusable_reason(head: StudentHead) -> str | None:
    """Return why `read_head` refuses this head, on any device; None where it does not."""
    try:
        _expect_linear(head.linear)
        if _is_lora(head.owner):
            _read_lora(head.owner)
    except ValueError as error:
        return str(error)
    return None


def _is_lora(layer: nn.Module) -> bool:
    """Return whether a layer of PEFT is LoRA's, whose A and B are linear layers; AdaLoRA's are bare parameters."""
    return isinstance(getattr(layer, "lora_A", None), nn.ModuleDict)


def _expect_linear(linear: nn.Module) -> None:
    plain = isinstance(linear, nn.Linear) and type(linear).forward is nn.Linear.forward
    if not plain or getattr(linear, "weight", None) is None:
        raise ValueError(
            f"lm_head: expected a plain torch.nn.Linear, got {type(linear).__module__}.{_name(linear)}; a quantised "
            "or custom head would be read wrongly by the fused loss. Leave the head out of quantisation and "
            "out of adapters other than LoRA"
        )


@contextlib.contextmanager
def whole(head: StudentHead) -> Iterator[HeadWeights]:
    """The weights of a head that may be a sharded (FSDP2) unit: gathered on entry, cut again on exit.

    For a frozen head that another model's forward reads. The head must have been called once before.
    """
    unit: Any = head.module if hasattr(head.module, "unshard") else None
    cut = isinstance(head.linear.weight, DTensor)
    if unit is not None and cut:
        unit.unshard()
    try:
        yield read_head(head)
    finally:
        if unit is not None and cut:
            unit.reshard()
        elif unit is not None:
            # a head that is one unit with the embedding: torch 2.11 cuts a unit again once all its modules were called,
            # and a body that ran by itself called the embedding alone
            weight: Any = head.linear.weight
            with torch.no_grad():
                unit(weight.new_empty(0, weight.shape[1]))


def _read_lora(layer: Any) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    """A and B of the one active, unmerged LoRA of a PEFT layer; None where adapters are off or merged."""
    if layer.disable_adapters or layer.merged:
        return None
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if not active:
        return None
    if len(active) > 1:
        raise ValueError(f"lm_head: expected one active LoRA adapter, got {active}")
    (name,) = active
    if name in getattr(layer, "lora_variant", {}) or layer.use_dora.get(name):
        raise ValueError("student.lora: DoRA and other LoRA variants on the head are not supported; leave the head out")
    dropout = layer.lora_dropout[name]
    if isinstance(dropout, nn.Dropout) and dropout.p > 0:
        raise ValueError(f"student.lora.dropout: expected 0 where the head has a LoRA, got {dropout.p}")
    a = layer.lora_A[name]
    b = layer.lora_B[name]
    if b.bias is not None or not isinstance(a, nn.Linear):
        raise ValueError("student.lora: a LoRA with biases on the head is not supported")
    return a.weight, b.weight, layer.scaling[name]


def call_head(head: StudentHead, hidden: torch.Tensor, compute: Callable[[torch.Tensor, HeadWeights], Any]) -> Any:
    """Run `compute(hidden, weights)` inside the head's own `__call__`, so that its hooks (FSDP's gather) have run.

    Args:
        hidden: [..., hidden]; goes through the head's hooks as in an ordinary call.
        compute: Function in place of the matrix product; receives the weights as they are inside the call.
    """
    return call_inside(head.module, lambda inside: compute(inside, read_head(head)), hidden, owner=head.owner)


def last_hidden(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """Return a frozen model's last hidden states for a batch, [B, S, hidden], without a graph.

    `use_cache=False` matters: with a cache, packed documents would attend to each other.
    """
    others = ("labels", "valid_rows", "content_mask")
    body = {key: value for key, value in batch.items() if key not in others and value is not None}
    # FSDP2 keeps one set of gathered weights, which must not be made under inference mode and read outside it
    decoder = decoder_of(model)
    with torch.no_grad() if hasattr(decoder, "unshard") else torch.inference_mode():
        return decoder(**body, use_cache=False).last_hidden_state


@torch.no_grad()
def probe_logits(model: nn.Module, role: str) -> LogitTransform:
    """Find the scale and soft cap between `model`'s head and its logits, and prove them on four tokens.

    Costs two forward passes over four tokens. A sharded model is read through its wrappers, on all processes.

    Args:
        model: A causal language model on any device; left in the mode (train or eval) it was in.

    Raises:
        ValueError: where the model's own logits are not finite, or no known reading of the configuration reproduces
            them.
    """
    head = find_head(model)
    weight: Any = head.linear.weight
    config = unwrap_peft(model).config.get_text_config()  # type: ignore[union-attr,operator]
    ids = torch.arange(4, device=weight.device)[None] % weight.shape[0]
    with eval_mode(model), _without_autocast(model, weight.device.type):
        hidden = decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state
        expected = model(input_ids=ids, use_cache=False).logits.double()
    product = call_head(head, hidden, _product)
    if expected.isnan().any() or (expected == torch.inf).any():
        narrow = product.dtype not in (torch.float32, torch.float64)
        dtype = f", or {product.dtype} is too narrow for them: set {role}.dtype to float32" if narrow else ""
        raise ValueError(
            f"{role}: the logits of {_name(unwrap_peft(model))} are NaN or infinite: its weights are damaged{dtype}"
        )
    tolerance = LOGIT_ROUNDINGS * torch.finfo(product.dtype).eps * expected.abs().max().clamp_min(1e-30)
    tried = []
    for shape in _candidates(config):
        difference = (shape.applied(product.double()) - expected).abs().max()
        if difference <= tolerance:
            return shape
        tried.append(f"scale {shape.scale:g}, softcap {shape.softcap}: off by {difference:.3g}")
    raise ValueError(
        f"{role}: the logits of {_name(unwrap_peft(model))} do not follow from its hidden states and head as this loss "
        f"computes them ({'; '.join(tried)}); training would be silently wrong, so this model type is refused"
    )


@contextlib.contextmanager
def _without_autocast(model: nn.Module, device_type: str) -> Iterator[None]:
    """No autocast, not even the one that accelerate puts into the forward of a model that a Trainer has prepared."""
    prepared = [module for module in {model, unwrap_peft(model)} if "_original_forward" in module.__dict__]
    forwards = [module.forward for module in prepared]
    for module in prepared:
        module.forward = module.__dict__["_original_forward"]
    try:
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        for module, forward in zip(prepared, forwards, strict=True):
            module.forward = forward


def _product(hidden: torch.Tensor, head: HeadWeights) -> torch.Tensor:
    product = F.linear(hidden.to(head.weight.dtype), head.weight, head.bias)
    if head.lora is not None:
        a, b, factor = head.lora
        product = product + factor * F.linear(F.linear(hidden.to(a.dtype), a), b)
    return product


def _candidates(config: Any) -> list[LogitTransform]:
    """Readings of a configuration, the likeliest first. `logits_scaling` divides in Granite, multiplies elsewhere."""
    caps = (getattr(config, field, None) for field in SOFT_CAPS)
    softcap = next((cap for cap in caps if cap is not None), None)
    scales = []
    scaling = getattr(config, "logits_scaling", None)
    if scaling:
        scales += [1.0 / scaling, float(scaling)]
    for field in LOGIT_SCALES:
        scale = getattr(config, field, None)
        if scale:
            scales.append(float(scale))
    scales = [scale for scale in scales if isinstance(scale, float)] + [1.0]
    shapes = [LogitTransform(scale, softcap) for scale in scales]
    return shapes + ([LogitTransform(scale) for scale in scales] if softcap is not None else [])


def _name(module: nn.Module) -> str:
    return type(module).__name__
