"""Every public function gives for a view what it gives for a contiguous copy, whichever of its tensors is the view.

Kernels address memory themselves: one that takes a view's neighbours in memory for its elements is wrong in silence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import distill_kernels
import pytest
import torch
from distill_kernels.examples import PUBLIC as CALLS
from distill_kernels.examples import VALUE_TYPES, Tensors
from distill_kernels.launch import device_facts
from helpers import relative_error

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # a view may take another path, with other roundings
UPSTREAM = "upstream gradients"
REFUSED = {(name, "weight") for name in ("split_k_linear", "SplitKLinear", "triton_linear")}  # rows with gaps
OTHER = 7  # what lies between the elements of a view


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    memory = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), OTHER)
    return memory[..., ::2]


def behind_another(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_full((tensor.numel() + 1,), OTHER)[1:].view(tensor.shape)


def column_of_a_table(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_full((*tensor.shape, 3), OTHER)[..., 1]


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_full((*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2]), OTHER).transpose(-1, -2)


def rows_apart(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 3), OTHER)[..., : tensor.shape[-1]]


VIEWS = {
    "strided": every_other,
    "offset": behind_another,
    "column": column_of_a_table,
    "transposed": transposed,
    "apart": rows_apart,
}
EXPANSIONS = {"expanded": 0, "widened": -1}  # the dimension along which all entries are one
FORMS = [*VIEWS, *EXPANSIONS]


def same_values(tensor: torch.Tensor, form: str) -> torch.Tensor:
    """`tensor`, contiguous; where a form says that entries are one, with the first of them for all."""
    if form in EXPANSIONS:
        tensor = tensor.narrow(EXPANSIONS[form], 0, 1).expand(tensor.shape)
    return tensor.contiguous()


def in_form(tensor: torch.Tensor, form: str) -> torch.Tensor:
    """The values of `same_values`, as a view of that form."""
    if form in EXPANSIONS:
        return tensor.narrow(EXPANSIONS[form], 0, 1).expand(tensor.shape)
    return VIEWS[form](tensor).copy_(tensor)


def applies(name: str, argument: str, tensor: torch.Tensor | None, form: str) -> bool:
    """Return whether a form of this tensor exists and is allowed."""
    if tensor is None:  # upstream gradients, of several shapes
        return form in ("strided", "offset", "column", "expanded")
    if form in ("transposed", "widened", "apart") and tensor.dim() == 1:
        return False
    if form in EXPANSIONS and argument in ("valid_rows", "teacher_ids"):
        return False  # each row, and each id of a row, once
    written = name == "FusedAdamW" and argument != "gradient"
    return not (written and form in EXPANSIONS)


def tensors_of(name: str, dtype: torch.dtype, device: torch.device) -> Tensors:
    call = CALLS[name]
    made = {key: value.to(device) for key, value in call.tensors().items()}
    return {key: x.to(dtype) if x.is_floating_point() and key not in call.fixed else x for key, x in made.items()}


def results(name: str, tensors: Tensors, upstream: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor] | str:
    """Outputs, and gradients for what `upstream` makes of random ones; or of what is refused, the field."""
    call = CALLS[name]
    tensors = {key: x.detach().requires_grad_(key in call.learned) for key, x in tensors.items()}
    try:
        made = call.run(**tensors)
    except ValueError as error:
        return str(error).split(":")[0]
    outputs = [made] if isinstance(made, torch.Tensor) else list(made)  # type: ignore[call-overload]
    if not call.learned:
        return outputs
    generator = torch.Generator().manual_seed(3)
    given = [torch.randn(out.shape, generator=generator).to(out.device, out.dtype) for out in outputs]
    given = [upstream(x) if x.dim() else x for x in given]
    gradients = torch.autograd.grad(outputs, [tensors[key] for key in sorted(call.learned)], given)
    return [*[out.detach() for out in outputs], *gradients]


@functools.lru_cache(maxsize=2)
def contiguous_results(name: str, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor] | str:
    return results(name, tensors_of(name, dtype, device), torch.Tensor.contiguous)


def check(name: str, argument: str, form: str, dtype: torch.dtype, device: torch.device) -> None:
    tensors = tensors_of(name, dtype, device)
    view, copy = (lambda x: in_form(x, form)), (lambda x: same_values(x, form))
    given = tensors if argument == UPSTREAM else tensors | {argument: view(tensors[argument])}
    actual = results(name, given, view if argument == UPSTREAM else torch.Tensor.contiguous)
    if form in VIEWS:
        expected = contiguous_results(name, dtype, device)
    elif argument == UPSTREAM:
        expected = results(name, tensors, copy)
    else:
        expected = results(name, tensors | {argument: copy(tensors[argument])}, torch.Tensor.contiguous)
    if (name, argument) in REFUSED and isinstance(actual, str):
        assert actual == argument
        return
    assert not isinstance(actual, str) and not isinstance(expected, str), f"refused for {actual}, a copy for {expected}"
    largest = max(other.double().norm().item() for other in expected)
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        error = relative_error(one, other)
        if other.double().norm() <= 1e-6 * largest:  # 0 but for rounding, as through a head of equal rows: sum(g) = 0
            error = (one.double() - other.double()).norm().item() / (largest or 1.0)  # all 0: of empty documents
        assert error <= TOLERANCE[dtype], f"result {index}: error {error:.2e}"


def product() -> list[tuple[str, str, str]]:
    """(name, argument, form) of everything there is."""
    cases = []
    for name, call in CALLS.items():
        arguments: dict[str, torch.Tensor | None] = dict(call.tensors())
        if call.learned and not call.scalar:
            arguments[UPSTREAM] = None
        for argument, tensor in arguments.items():
            cases += [(name, argument, form) for form in FORMS if applies(name, argument, tensor, form)]
    return cases


def pairwise() -> dict[str, tuple[str, str, str, torch.dtype]]:
    """Every argument of every function in one form; where functions share their code, in half of all, each in one."""
    shared: dict[tuple[str, str], list[tuple[str, str]]] = {}
    single: dict[tuple[str, str], list[str]] = {}
    for name, argument, form in product():
        if CALLS[name].family:
            shared.setdefault((CALLS[name].family, argument), []).append((name, form))
        else:
            single.setdefault((name, argument), []).append(form)
    chosen = [(*key, forms[turn % len(forms)]) for turn, (key, forms) in enumerate(single.items())]
    for turn, ((_, argument), pairs) in enumerate(shared.items()):
        forms = list(dict.fromkeys(form for _, form in pairs))
        for form in forms[turn % 2 :: 2]:  # and of the functions that take it the one least tried
            names = [name for name, other in pairs if other == form]
            chosen.append((min(names, key=lambda name: sum(name == case[0] for case in chosen)), argument, form))
    cases = [(*case, CALLS[case[0]].dtypes) for case in sorted(chosen)]
    return {"-".join(case): (*case, dtypes[turn % len(dtypes)]) for turn, (*case, dtypes) in enumerate(cases)}


PAIRS = pairwise()


def test_every_public_name_is_tried():
    assert set(CALLS) | VALUE_TYPES == set(distill_kernels.__all__)


@pytest.mark.plain(
    "BiasGELU-b-offset",
    "FusedAdamW-other-column",
    "FusedPolicyGradientLoss-advantages-expanded",
    "FusedTVDLoss-lora_b-strided",
    "KVCache-counts-strided",
    "RMSNorm-upstream gradients-offset",
    "TeacherHead-w-column",
    "bias_gelu-x-strided",
    "decode_attention-lengths-column",
    "distillation_loss-upstream gradients-offset",
    "fp8_linear-weight-apart",
    "fused_log_probs-hidden-widened",
    "fused_policy_gradient_loss-student_bias-strided",
    "geglu-up-offset",
    "head_loss-teacher_weight-offset",
    "layer_norm-x-strided",
    "rms_norm-weight-expanded",
    "sample_tokens-seeds-expanded",
    "swap_linears_for_fp8-weight-strided",
    "tvd-token_weights-strided",
)
@pytest.mark.parametrize("name, argument, form, dtype", list(PAIRS.values()), ids=list(PAIRS))
def test_views_give_the_results_of_copies(kernel_device, name, argument, form, dtype):
    check(name, argument, form, dtype, kernel_device)


@pytest.mark.slow  # 100 s: what the pairs above leave out is the same code with another form
@pytest.mark.parametrize("name, argument", list(dict.fromkeys(case[:2] for case in product())))
def test_all_views_as_copies(kernel_device, name, argument):
    dtypes = CALLS[name].dtypes
    for turn, form in enumerate(form for *case, form in product() if case == [name, argument]):
        check(name, argument, form, dtypes[turn % len(dtypes)], kernel_device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_compiled_kernels_take_views_as_copies(kernel_device, name):
    if name in ("Fp8Linear", "fp8_linear", "swap_linears_for_fp8") and not device_facts(kernel_device).fp8:
        pytest.skip("this family of GPUs has no products of e4m3")
    for _, argument, form in (case for case in product() if case[0] == name):
        for dtype in CALLS[name].dtypes:
            check(name, argument, form, dtype, kernel_device)
