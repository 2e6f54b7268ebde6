"""A student cut from its teacher: the same model with fewer layers, starting from the teacher's own weights.

Which layers go matters more than how many. `layers: N` of `L` keeps the first and the last layers and drops one block
of `L - N` neighbours in the middle; see `layers_to_keep`. Neighbouring middle layers change the hidden states least
and alike (Men et al., 2024, ShortGPT; Gromov et al., 2024, The Unreasonable Ineffectiveness of the Deeper Layers).
`keep: [...]` names the layers outright.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from distill.core.errors import first_line
from distill.models.layers import check_kept, find_layers
from distill.models.load.read_weights import UnfitWeightsError, read_weights
from distill.models.names import DENSE_LAYERS, LAYER_NUMBERS, PER_LAYER_LISTS
from distill.models.prune.widths import Widths, with_widths

JOINED = {"embed_tokens_per_layer.weight": 1, "per_layer_model_projection.weight": 0}  # by the dimension of the layers
# what a module may know of its position and of others', which the configuration is held to
POSITION = ("layer_id", "layer_number", "kv_shared_layer_index", "store_full_length_kv")


LEAST_TOKENS = 5


def trial_ids(config: Any, count: int) -> torch.Tensor:
    """Return token ids [1, count] on which a teacher of a configuration is tried before it is cut.

    They begin after the first three, which are often special tokens, such as padding, whose embedding may be zero.

    Raises:
        ValueError: The vocabulary has too few tokens to tell a right cut from a wrong one.
    """
    size = config.get_text_config().vocab_size
    if size < LEAST_TOKENS:
        raise ValueError(
            f"student.from_teacher: expected a teacher with a vocabulary of at least {LEAST_TOKENS} tokens, got {size}"
        )
    return torch.arange(count)[None] * 7 % min(97, size - 3) + 3


def cut_layers(
    teacher: PreTrainedModel,
    keep: Sequence[int],
    dtype: torch.dtype | None = None,
    *,
    widths: Widths | None = None,
    narrow: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: tensor,
) -> PreTrainedModel:
    """A copy of `teacher` that holds only the layers `keep`.

    The copy is built from a configuration with fewer layers (per-layer lists such as `layer_types` cut alike) and gets
    the teacher's weights under their new numbers: kept layers compute exactly what they did, tied weights stay tied,
    and saving and loading gives the same model back.

    Args:
        teacher: Not changed; must not be sharded.
        dtype: Dtype of the copy; None for the teacher's.
        widths: Sizes of the copy; None for the teacher's.
        narrow: Makes a parameter of these widths of the teacher's parameter of that name.

    Raises:
        ValueError: layer numbers out of range, or an architecture whose layers would behave differently in their new
            positions.
    """
    prefix, layers = find_layers(teacher)
    indices = check_kept(keep, len(layers))
    config = student_config(teacher.config, indices, widths)
    state = {}
    for name, tensor in teacher.state_dict().items():
        renamed = _renumber(name, prefix + ".", indices)
        if renamed is not None:
            part = narrow(name, _of_layers(name, tensor, indices, len(layers))).detach()
            # never shared: training the student leaves the teacher alone
            state[renamed] = part.clone() if part.data_ptr() == tensor.data_ptr() else part
    model_class: Any = type(teacher)
    try:
        student = read_weights(
            model_class,
            None,
            "student.from_teacher",
            config=config,
            dtype=dtype or teacher.dtype,
            state_dict=state,
            attn_implementation=teacher.config._attn_implementation,
        )
    except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as error:
        what = f"student.from_teacher: {type(teacher).__name__} cannot be cut to the layers {indices}: "
        if not isinstance(error, UnfitWeightsError):
            raise ValueError(f"{what}{type(error).__name__}: {first_line(error)}") from error
        raise ValueError(
            f"{what}they have other parts in their new positions ({', '.join(error.names[:1]) or error}); choose "
            "layers that keep the pattern"
        ) from error
    # transformers calls a model that no files were read for "None", which PEFT would look for on the hub
    student.name_or_path = ""
    student.config.name_or_path = ""
    student = student.to(teacher.device)  # type: ignore[arg-type]
    cut = find_layers(student)[1] if widths is None else _without_memory(teacher, indices)
    for position, number in enumerate(indices):
        _same_behaviour(layers[number], cut[position], number, position)
    student.generation_config = copy.deepcopy(teacher.generation_config)
    return student


def _without_memory(teacher: PreTrainedModel, keep: Sequence[int]) -> nn.ModuleList:
    """The layers of a copy in the teacher's own widths, on the meta device."""
    with torch.device("meta"):
        return find_layers(type(teacher)(student_config(teacher.config, keep)))[1]


def student_config(config: Any, keep: Sequence[int], widths: Widths | None = None) -> Any:
    """Return `cut_config`, with other widths where they are given, in a form that can be saved and read back.

    Raises:
        ValueError: transformers refuses such a configuration, or makes another of it.
    """
    cut = cut_config(config, keep)
    what = f"student.from_teacher: {type(config).__name__} cannot be cut to the layers {list(keep)}"
    if widths is not None:
        cut = with_widths(cut, widths)
        what = f"student.from_teacher: {type(config).__name__} cannot be cut to {len(keep)} layers and {widths}"
    written = cut.to_dict()
    try:
        again = type(config).from_dict(copy.deepcopy(written)).to_dict()
    except Exception as error:  # a configuration's own checks raise what they like
        raise ValueError(f"{what}: {first_line(error.__cause__ or error)}") from error
    changed = [name for name, value in written.items() if again.get(name) != value]
    if changed:
        raise ValueError(f"{what}: read back, its configuration has another {changed[0]}; choose other layers")
    return cut


def cut_config(config: Any, keep: Sequence[int]) -> Any:
    """Return a copy of `config` for the layers `keep`: whatever it says of single layers by their number.

    Raises:
        ValueError: a kept layer takes keys and values, or selected tokens, of one that is not kept.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    total = text.num_hidden_layers
    of_layers = text.to_dict().get("per_layer_config")  # settings by layer that differ from the others'
    sharing = getattr(text, "num_kv_shared_layers", None)
    if sharing:
        text.num_kv_shared_layers = _kept_sharing(text.layer_types, total - sharing, keep)
    for name, value in vars(text).items():
        if isinstance(value, list | tuple) and name in LAYER_NUMBERS:
            setattr(text, name, [keep.index(number) for number in value if number in keep])
        elif isinstance(value, list | tuple) and len(value) == total and ("layer" in name or name in PER_LAYER_LISTS):
            setattr(text, name, [value[number] for number in keep])
        elif isinstance(value, int) and name in DENSE_LAYERS:
            setattr(text, name, sum(number < value for number in keep))
    if "shared" in (getattr(text, "indexer_types", None) or ())[:1]:
        raise ValueError(
            f"student.from_teacher: layer {keep[0]} attends to tokens that an earlier layer's indexer selects; keep "
            "one with an indexer before it"
        )
    if getattr(text, "scale_depth", None):  # residuals are multiplied by scale_depth / sqrt(num_hidden_layers)
        text.scale_depth *= math.sqrt(len(keep) / total)
    text.num_hidden_layers = len(keep)
    if of_layers is not None:
        of_layers = {int(number): value for number, value in of_layers.items()}
        text.per_layer_config = {n: of_layers[number] for n, number in enumerate(keep) if number in of_layers}
    return config


def _kept_sharing(types: Sequence[str], first: int, keep: Sequence[int]) -> int:
    """Return how many of `keep`, from layer `first` on, reuse keys and values of an earlier layer of their type."""
    sharing = [number for number in keep if number >= first]
    for number in sharing:
        source = max(n for n in range(first) if types[n] == types[number])
        if source not in keep:
            raise ValueError(
                f"student.from_teacher: layer {number} takes keys and values of layer {source}, which is not kept; "
                f"keep {source} too, or no layer from {first} on"
            )
    return len(sharing)


def _of_layers(name: str, tensor: torch.Tensor, keep: Sequence[int], total: int) -> torch.Tensor:
    """The part of a tensor that belongs to the layers `keep`, where it holds one beside the other for each layer."""
    dim = next((dim for end, dim in JOINED.items() if name.endswith(end)), None)
    if dim is None:
        return tensor
    return (
        tensor.unflatten(dim, (total, -1))
        .index_select(dim, torch.tensor(keep, device=tensor.device))
        .flatten(dim, dim + 1)
    )


def _renumber(name: str, prefix: str, keep: Sequence[int]) -> str | None:
    """A weight's name in the cut model; None for one that goes."""
    if not name.startswith(prefix):
        return name
    number, _, rest = name.removeprefix(prefix).partition(".")
    return f"{prefix}{keep.index(int(number))}.{rest}" if int(number) in keep else None


def _same_behaviour(before: nn.Module, after: nn.Module, number: int, position: int) -> None:
    """Hold that a layer is configured in its new position as in its old one (sliding window, rotary or not, ...)."""
    old = dict(before.named_modules())
    new = dict(after.named_modules())
    if old.keys() != new.keys():
        raise ValueError(
            f"student.from_teacher: layer {number} has other parts in its new position; choose other layers"
        )
    for name, module in old.items():
        for key, value in vars(module).items():
            if not isinstance(value, bool | int | float | str | None):
                continue
            if key in ("training", *POSITION) or key.startswith("_"):
                continue
            here = getattr(new[name], key, None)
            if isinstance(value, float) and isinstance(here, float) and math.isclose(value, here, rel_tol=1e-12):
                continue
            if here != value and not ("idx" in key and (value, here) == (number, position)):
                raise ValueError(
                    f"student.from_teacher: layer {number} has {key}={value!r} in the teacher and "
                    f"{here!r} in its new position; choose layers that keep the pattern"
                )
