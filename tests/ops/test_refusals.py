"""Invalid kernel operands are refused by name, on the CPU path as well as on the kernels'."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from distill_kernels.examples import EXAMPLES, Tensors
from distill_kernels.examples import PUBLIC as CALLS

LOSSES = {name for name, call in CALLS.items() if call.family} | {"TeacherHead", "cross_entropy", "head_loss"}
OWNERS = {"FusedAdamW", "swap_linears_for_fp8", "call_inside"}  # their tensors are a model's, or a function's own
NAMES = [name for name in CALLS if name not in LOSSES | OWNERS]
BY_TORCH = {"split_k_linear", "SplitKLinear"}  # their gradients are torch's own products
LEARNING = [name for name in NAMES if CALLS[name].learned]
MIXTURES = ["experts: silu", "route: softmax"]  # whose functions are no public names


@pytest.fixture(params=["kernels", "reference"])
def path(request, device) -> Iterator[torch.device]:
    """Device on which kernels, or the references, get the tensors."""
    if request.param == "reference":
        yield torch.device("cpu")
        return
    pytest.importorskip("triton")
    from distill_kernels.launch import interpreted

    with contextlib.nullcontext() if device.type == "cuda" else interpreted():
        yield device


def tensors_of(name: str, device: torch.device) -> Tensors:
    call = EXAMPLES[name]
    made = {key: value.to(device) for key, value in call.tensors().items()}
    return {
        key: x.to(call.dtypes[0]) if x.is_floating_point() and key not in call.fixed else x for key, x in made.items()
    }


def loss_of(name: str, tensors: Tensors) -> torch.Tensor:
    made = EXAMPLES[name].run(**tensors)
    outputs = (made,) if isinstance(made, torch.Tensor) else made
    return sum(out.float().square().sum() for out in outputs)  # type: ignore[union-attr, return-value]


def each_in_turn(name: str, device: torch.device, change: Callable[[torch.Tensor], object], expected: str) -> None:
    tensors = tensors_of(name, device)
    for argument, tensor in tensors.items():
        with pytest.raises(ValueError, match=expected):
            CALLS[name].run(**tensors | {argument: change(tensor)})


@pytest.mark.parametrize("name", NAMES)
def test_arguments_that_are_no_tensors(path, name):
    each_in_turn(name, path, lambda tensor: tensor.tolist(), r"\w+: expected a torch.Tensor, got builtins.list")


@pytest.mark.parametrize("name", NAMES)
def test_sparse_tensors_are_refused(path, name):
    each_in_turn(name, path, torch.Tensor.to_sparse, r"\w+: expected a dense tensor, got layout torch.sparse_coo")


@pytest.mark.parametrize("name", NAMES)
def test_vmap_is_refused(path, name):
    tensors = tensors_of(name, path)
    for argument, tensor in tensors.items():
        with pytest.raises(ValueError, match=r"\w+: expected a plain tensor, got one inside torch.vmap or"):
            torch.vmap(lambda one, key=argument: CALLS[name].run(**tensors | {key: one}))(torch.stack([tensor, tensor]))


@pytest.mark.parametrize("name", LEARNING)
def test_functional_gradients_are_refused(path, name):
    tensors = tensors_of(name, path)
    for argument in sorted(CALLS[name].learned):
        with pytest.raises(ValueError, match=r"\w+: expected a plain tensor, got one inside torch.vmap or"):
            torch.func.grad(lambda one, key=argument: loss_of(name, tensors | {key: one}))(tensors[argument])


@pytest.mark.parametrize("name", [*MIXTURES, *(name for name in LEARNING if name not in BY_TORCH)])
def test_gradients_of_gradients_are_refused(path, name):
    """A penalty on a gradient added 0: the gradient came back as a constant."""
    tensors = tensors_of(name, path)
    learned = [tensors[key].requires_grad_() for key in sorted(EXAMPLES[name].learned)]
    loss = loss_of(name, tensors)
    with pytest.raises(ValueError, match=r"create_graph: expected False, since .*, got True"):
        torch.autograd.grad(loss, learned, create_graph=True)


@pytest.mark.parametrize("name", sorted(BY_TORCH))
def test_gradients_of_gradients_by_torch(path, name):
    tensors = tensors_of(name, path)
    x, weight = tensors["x"].requires_grad_(), tensors["weight"]
    (gradient,) = torch.autograd.grad(loss_of(name, tensors), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.float().sum(), x)
    expected = 2 * (weight.float().T @ weight.float()).sum(0).expand(x.shape)
    torch.testing.assert_close(second.float(), expected, rtol=0.02, atol=0.05)
