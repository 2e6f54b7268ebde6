"""Launch plans: later calls of an op allocate and launch what its launcher would have, for arguments of their own."""

import gc
import inspect
import random
import weakref

import pytest
import torch
from distill_kernels import kernel_op, launch_plans
from distill_kernels.kernel_op import NO_PLAN, KernelOp
from distill_kernels.launch_plans import LaunchPlan, launch, record


class Compiled:
    """Stands for a compiled Triton kernel on a machine without a GPU: `started` holds what the driver was given."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, started):
        self.started = started

    def run(self, x, y, z, stream, function, metadata, *rest):
        hooks, arguments = rest[:3], rest[3:]
        assert (stream, function, metadata, hooks) == (7, "function", "metadata", (None, None, None))
        self.started.append(((x, y, z), arguments))


class Kernel:
    """Stands for a `triton.jit` function of the given Python signature."""

    def __init__(self, function, started):
        self.fn, self.started = function, started
        self.arg_names = list(inspect.signature(function).parameters)
        self.looked_up = 0

    def __getitem__(self, grid):
        def looked_up(*args, **options):
            self.looked_up += 1
            bound = inspect.signature(self.fn).bind(
                *args, **{name: value for name, value in options.items() if name in self.arg_names}
            )
            bound.apply_defaults()
            self.started.append(((*grid, 1, 1)[:3], tuple(map(address, bound.arguments.values()))))
            for hook in [] if launch_plans.LAUNCH_HOOKS is None else launch_plans.LAUNCH_HOOKS.calls:
                hook(None)
            return Compiled(self.started)

        return looked_up


def address(value):
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return tuple(map(address, value)) if isinstance(value, tuple) else value


@pytest.fixture
def machine(monkeypatch):
    """CPU tensors taken for those of CUDA device 0, and what was started there."""
    monkeypatch.setattr(launch_plans, "current_device", lambda: -1)
    monkeypatch.setattr(kernel_op, "current_device", lambda: -1)
    monkeypatch.setattr(launch_plans, "current_stream", lambda device: 7)
    monkeypatch.setattr(
        launch_plans,
        "empty_on_current_device",
        lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype),
    )
    monkeypatch.setattr(kernel_op, "on_gpu", lambda tensor: True)
    return []


def scale_rows(x_ptr, parts_ptr, y_ptr, sizes, factor, BLOCK, HAS_BIAS=False): ...


def add_parts(parts_ptr, second_ptr, out_ptr, count, BLOCK): ...


@pytest.fixture
def ops(machine, request):
    first, second = Kernel(scale_rows, machine), Kernel(add_parts, machine)

    def launcher(
        x: torch.Tensor, bias: torch.Tensor | None, factor: float, more: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
        parts = torch.empty(2, x.shape[0], dtype=torch.float32)
        total = x.new_empty(x.shape[0] if bias is not None else 0)
        launch(first, (x.shape[0],), x, parts, y, (x, *x.shape), factor, BLOCK=16, num_warps=4)
        if bias is not None:
            launch(second, (2, 3), parts[0], parts[1], total, len(bias), BLOCK=8 if more == "wide" else 4)
        return y, total

    def fake(x, bias, factor, more):
        return torch.empty_like(x), x.new_empty(0)

    def check(x, bias, factor, more):
        checked.append(factor)
        if factor <= 0:
            raise ValueError(f"factor: expected > 0, got {factor}")

    checked = []
    op = KernelOp(f"test_plan_{request.node.name.replace('[', '_').rstrip(']')}", launcher, fake, check=check)
    return op, (first, second), checked


def test_later_calls_start_what_the_launcher_would(ops, machine):
    op, kernels, checked = ops
    generator = random.Random(1)
    held = []
    for call in range(60):
        rows, columns = generator.choice([(3, 8), (5, 8)])
        x = torch.randn(rows, columns + 8, dtype=generator.choice([torch.float32, torch.bfloat16]))
        x = x[:, :columns] if generator.random() < 0.5 else x[:, :columns].contiguous()
        bias = torch.randn(columns) if generator.random() < 0.5 else None
        factor = generator.choice([1, 1.0, 0.5])
        machine.clear()
        y, total = op(x, bias, factor, "wide")
        held.append((x, bias, y, total))
        grid, arguments = machine[0]
        parts = arguments[1]
        assert grid == (rows, 1, 1) and len(machine) == (1 if bias is None else 2)
        assert arguments == (x.data_ptr(), parts, y.data_ptr(), (x.data_ptr(), rows, columns), factor, 16, False)
        assert type(arguments[4]) is type(factor)
        assert y.shape == x.shape and y.dtype == torch.float32 and y.is_contiguous() and total.dtype == x.dtype
        if bias is not None:
            second = (parts, parts + 4 * rows, total.data_ptr(), columns, 8)
            assert machine[1] == ((2, 3, 1), second) and total.shape == (rows,)
        assert kernels[0].looked_up <= call + 1
    assert kernels[0].looked_up < 50 and any(isinstance(plan, LaunchPlan) for plan in op._plans.values())
    assert len({held_y.data_ptr() for _, _, held_y, _ in held}) == 60  # outputs are new at each call
    assert len(checked) < 60


def test_arguments_of_another_description_are_checked(ops, machine):
    op, _, _ = ops
    x = torch.randn(3, 8)
    for _ in range(4):
        op(x, None, 1.0, "wide")
    with pytest.raises(ValueError, match="factor: expected > 0, got -1"):
        op(x, None, -1.0, "wide")
    with pytest.raises(ValueError, match="factor: expected > 0, got -1"):
        op(x, None, -1.0, "wide")


def test_unaligned_tensors_go_to_tritons_lookup(ops, machine):
    op, (kernel, _), _ = ops
    wide = torch.randn(3 * 8 + 1)
    for _ in range(4):
        op(wide[:24].view(3, 8), None, 1.0, "wide")
    looked_up = kernel.looked_up
    op(wide[1:].view(3, 8), None, 1.0, "wide")
    assert kernel.looked_up == looked_up + 1 and machine[-1][1][0] == wide.data_ptr() + 4
    op(wide[:24].view(3, 8), None, 1.0, "wide")
    assert kernel.looked_up == looked_up + 1


def test_a_plan_of_one_tensor_given_twice_holds_for_such_calls_alone(machine):
    kernel = Kernel(lambda x_ptr, other_ptr, y_ptr: None, machine)

    def launcher(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        launch(kernel, (1,), x, other, y)
        return y

    op = KernelOp("test_plan_twice", launcher, lambda x, other: torch.empty_like(x))
    x, other = torch.randn(8), torch.randn(8)
    for tensor in (x, x, x, other):
        op(tensor, tensor)
    assert kernel.looked_up == 2 and machine[-1][1][:2] == (other.data_ptr(),) * 2
    for _ in range(3):
        y = op(x, other)
    assert kernel.looked_up == 3 and machine[-1][1] == (x.data_ptr(), other.data_ptr(), y.data_ptr())
    op(other, other)
    assert kernel.looked_up == 3 and machine[-1][1][:2] == (other.data_ptr(),) * 2


KEPT = torch.zeros(4)
UNPLANNED = {
    "a copy": lambda x, go: go(x.t().contiguous(), torch.empty_like(x)),
    "a filled buffer": lambda x, go: go(x, torch.zeros_like(x)),
    "a part of an input": lambda x, go: go(x[1:], torch.empty_like(x)),
    "a tensor of its own": lambda x, go: go(x, torch.empty_like(x), KEPT),
    "a view as a result": lambda x, go: go(x, torch.empty_like(x))[1:],
    "a launch that nobody noted": lambda x, go: go.unseen(x, torch.empty_like(x)),
}


@pytest.mark.parametrize("name", UNPLANNED)
def test_launches_that_a_plan_cannot_repeat_have_none(machine, name):
    if name == "a launch that nobody noted" and launch_plans.LAUNCH_HOOKS is None:
        pytest.skip("needs triton")
    kernel = Kernel(lambda x_ptr, y_ptr, kept_ptr=None: None, machine)

    def go(x, y, *more):
        launch(kernel, (1,), x, y, *more)
        return y

    def unseen(x, y):
        kernel[(1,)](x, y)
        return y

    go.unseen = unseen
    x = torch.randn(4, 4)
    outputs, plan = record(lambda x: UNPLANNED[name](x, go), (x,))
    assert plan is None and outputs.shape[1] == 4
    assert record(lambda x: go(x, torch.empty_like(x)), (x,))[1] is not None


def test_an_op_without_a_plan_is_not_recorded_again(machine):
    kernel = Kernel(lambda x_ptr, y_ptr: None, machine)

    def launcher(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        launch(kernel, (1,), x, y)
        return y

    op = KernelOp("test_plan_never", launcher, torch.empty_like)
    for _ in range(5):
        op(torch.randn(8))
    assert kernel.looked_up == 5 and list(op._plans.values()) == [NO_PLAN]


def test_a_gradient_goes_through_planned_launches(machine):
    kernel, back = Kernel(lambda x_ptr, y_ptr: None, machine), Kernel(lambda dy_ptr, dx_ptr: None, machine)

    def launch_backward(dy: torch.Tensor) -> torch.Tensor:
        dx = torch.empty_like(dy)
        launch(back, (1,), dy, dx)
        return dx

    def launcher(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        launch(kernel, (1,), x, y)
        return y

    backward_op = KernelOp("test_plan_gradient_backward", launch_backward, torch.empty_like)
    op = KernelOp(
        "test_plan_gradient",
        launcher,
        torch.empty_like,
        setup_context=lambda ctx, inputs, output: None,
        backward=lambda ctx, dy: backward_op(dy),
    )
    x, dy = torch.randn(8, requires_grad=True), torch.randn(8)
    for _ in range(4):
        y = op(x)
        (dx,) = torch.autograd.grad(y, x, dy)
        assert machine[-1][1] == (dy.data_ptr(), dx.data_ptr()) and machine[-2][1] == (x.data_ptr(), y.data_ptr())
    assert kernel.looked_up == back.looked_up == 2
    with pytest.raises(ValueError, match="create_graph"):
        torch.autograd.grad(op(x), x, dy, create_graph=True)


def test_outputs_die_with_their_last_reference(machine):
    """An output that lives on keeps its graph, whose leaves belong to another stream than a captured backward's."""
    kernel = Kernel(lambda x_ptr, parts, y_ptr: None, machine)

    def launcher(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        launch(kernel, (1,), x, (x, y, 3), y)
        return y

    op = KernelOp(
        "test_plan_lifetime",
        launcher,
        torch.empty_like,
        setup_context=lambda ctx, inputs, output: None,
        backward=lambda ctx, dy: dy,
    )
    x = torch.randn(8, requires_grad=True)
    gc.disable()
    try:
        for _ in range(4):
            y = op(x)
            node = weakref.ref(y.grad_fn)
            del y
            assert node() is None
    finally:
        gc.enable()
    assert kernel.looked_up == 2


def test_a_profiler_of_triton_sees_every_launch(ops, machine):
    if launch_plans.LAUNCH_HOOKS is None:
        pytest.skip("needs triton")
    op, (kernel, _), _ = ops
    x = torch.randn(3, 8)
    for _ in range(4):
        op(x, None, 1.0, "wide")
    seen = []
    launch_plans.LAUNCH_HOOKS.add(seen.append)
    try:
        op(x, None, 1.0, "wide")
    finally:
        launch_plans.LAUNCH_HOOKS.remove(seen.append)
    assert kernel.looked_up == 3
