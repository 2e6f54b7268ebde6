"""Gradients of ops with launch plans: a backward's launches and allocations are replayed as its forward's are."""

import gc
import random
import weakref

import pytest
import torch
from distill_kernels.kernel_op import KernelOp
from distill_kernels.launch import HAS_TRITON, launch
from launched import Native

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
if HAS_TRITON:
    from stand_in_gpu import Kernel, stand_in_gpu


@pytest.fixture
def native():
    with stand_in_gpu():
        yield Native()


@pytest.fixture
def differentiable(native, request):
    """An op with a backward of its own op, and the kernels of both."""
    kernel, back = Kernel(lambda x_ptr, w_ptr, y_ptr: None, native), Kernel(lambda dy_ptr, w_ptr, dx_ptr: None, native)

    def launch_backward(dy: torch.Tensor, rest: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        dx = torch.empty_like(dy)
        launch(back, (1,), dy, rest, dx)
        return dx

    def launcher(x: torch.Tensor, weight: torch.Tensor | None, form: str) -> tuple[torch.Tensor, torch.Tensor]:
        y, rest = torch.empty_like(x), x.new_empty(3)
        launch(kernel, (1,), x, weight, y)
        return y, rest

    def setup_context(ctx, inputs, output):
        _, weight, ctx.form = inputs
        ctx.save_for_backward(output[1], weight)

    def backward(ctx, dy):
        rest, weight = ctx.saved_tensors
        needed.append(ctx.needs_input_grad)
        assert ctx.form == "form"
        return backward_op(dy, rest, weight), torch.ones_like(weight) if ctx.needs_input_grad[1] else None, None

    needed = []
    name = "test_gradient_" + "".join(letter if letter.isalnum() else "_" for letter in request.node.name)
    backward_op = KernelOp(f"{name}_backward", launch_backward, lambda dy, rest, weight: torch.empty_like(dy))
    op = KernelOp(
        name,
        launcher,
        lambda x, weight, form: (torch.empty_like(x), x.new_empty(3)),
        setup_context=setup_context,
        backward=backward,
        results=1,
    )
    return op, kernel, back, needed


def test_a_gradient_goes_through_planned_launches(differentiable, native):
    op, kernel, back, needed = differentiable
    x, dy = torch.randn(8, requires_grad=True), torch.randn(8)
    for call in range(5):
        native.started.clear()
        y = op(x, None, "form")
        (dx,) = torch.autograd.grad(y, x, dy)
        if call > 1:
            forward, backward = (arguments for _, arguments in native.started)
            assert forward == (x.data_ptr(), None, y.data_ptr())
            assert (backward[0], backward[2]) == (dy.data_ptr(), dx.data_ptr())
    assert kernel.looked_up == back.looked_up == 2 and needed == [(True, False, False)] * 2
    with pytest.raises(ValueError, match="create_graph"):
        torch.autograd.grad(op(x, None, "form"), x, dy, create_graph=True)


def test_a_tensor_kept_outside_of_save_for_backward_is_refused(native):
    """The context is made once for all calls of one description: they would all read the first call's tensor."""

    def launcher(x: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        return x * teacher

    def setup_context(ctx, inputs, output):
        ctx.teacher = inputs[1]

    op = KernelOp(
        "test_gradient_of_a_kept_tensor",
        launcher,
        lambda x, teacher: torch.empty_like(x),
        setup_context=setup_context,
        backward=lambda ctx, dy: (dy * ctx.teacher, None),
    )
    with pytest.raises(TypeError, match=r"expected tensors in save_for_backward, got one as ctx\.teacher"):
        op(torch.randn(8, requires_grad=True), torch.randn(8))


def test_gradients_follow_which_inputs_require_them(differentiable):
    op, _, _, needed = differentiable
    generator = random.Random(2)
    for _ in range(40):
        wanted = generator.choice([(True, False), (False, True), (True, True), (False, False)])
        x, weight = (torch.randn(8, requires_grad=wants) for wants in wanted)
        y = op(x, weight, "form")
        assert y.requires_grad == any(wanted)
        if any(wanted):
            y.backward(torch.randn(8))
            assert ((x.grad is not None), (weight.grad is not None)) == wanted
    assert {(x, weight) for x, weight, _ in needed} == {(True, False), (False, True), (True, True)}
    with torch.no_grad():
        assert not op(torch.randn(8, requires_grad=True), None, "form").requires_grad


def test_other_strides_of_a_gradient_get_a_plan_of_their_own(differentiable, native):
    op, _, back, _ = differentiable
    x = torch.randn(8, requires_grad=True)
    for dy in [torch.randn(8), torch.randn(16)[::2]] * 4:
        torch.autograd.grad(op(x, None, "form"), x, dy)
        assert len(native.started) == 0 or native.started[-1][1][0] in (dy.data_ptr(), x.data_ptr())
    assert back.looked_up == 4


def test_saved_tensors_that_hooks_have_moved_are_described_anew(differentiable, native):
    op, _, back, _ = differentiable
    x, weight, dy = torch.randn(8, requires_grad=True), torch.randn(8), torch.randn(8)
    for _ in range(3):
        torch.autograd.grad(op(x, weight, "form"), x, dy)
    looked_up, kept = back.looked_up, []

    def spread(tensor):
        kept.append(torch.stack([tensor, tensor], -1)[:, 0])
        return kept[-1]

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, spread):
        y = op(x, weight, "form")
    torch.autograd.grad(y, x, dy)
    assert back.looked_up == looked_up + 1 and len(kept) == 2


def test_outputs_die_with_their_last_reference(differentiable):
    """An output that lives on keeps its graph, whose leaves belong to another stream than a captured backward's."""
    op, kernel, _, _ = differentiable
    x = torch.randn(8, requires_grad=True)
    gc.disable()
    try:
        for _ in range(4):
            y = op(x, None, "form")
            output, node = weakref.ref(y), weakref.ref(y.grad_fn)
            del y
            assert output() is None and node() is None
    finally:
        gc.enable()
    assert kernel.looked_up == 2


def test_an_output_that_nobody_holds_is_freed_by_backward(differentiable):
    op, _, _, _ = differentiable
    x, dy = torch.randn(8, requires_grad=True), torch.randn(8)
    gc.disable()
    try:
        for _ in range(4):
            y = op(x, None, "form")
            (rest,) = (tensor for tensor in y.grad_fn.saved_tensors if tensor is not None)
            rest = weakref.ref(rest.untyped_storage())
            y.backward(dy)
            assert rest() is None
    finally:
        gc.enable()
