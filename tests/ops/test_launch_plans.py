"""Launch plans: later calls of an op allocate and launch what its launcher would have, for arguments of their own."""

import random
import subprocess
import sys

import pytest
import torch
from distill_kernels import kernel_op, launch_plans
from distill_kernels.kernel_op import KernelOp
from distill_kernels.launch import HAS_TRITON, TensorDescriptor, launch
from distill_kernels.launch_plans import PlannedFunction
from launched import Native
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
if HAS_TRITON:
    from stand_in_gpu import Kernel, stand_in_gpu


@pytest.fixture
def native():
    with stand_in_gpu():
        yield Native()


def scale_rows(x_ptr, parts_ptr, y_ptr, sizes, factor, BLOCK, HAS_BIAS=False): ...


def add_parts(parts_ptr, second_ptr, out_ptr, count, BLOCK): ...


@pytest.fixture
def ops(native, request):
    first, second = Kernel(scale_rows, native), Kernel(add_parts, native)

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


def test_later_calls_start_what_the_launcher_would(ops, native):
    op, kernels, checked = ops
    generator = random.Random(1)
    held, replayed = [], 0
    for _ in range(60):
        rows, columns = generator.choice([(3, 8), (5, 8)])
        x = torch.randn(rows, columns + 8, dtype=generator.choice([torch.float32, torch.bfloat16]))
        x = x[:, :columns] if generator.random() < 0.5 else x[:, :columns].contiguous()
        bias = torch.randn(columns) if generator.random() < 0.5 else None
        factor = generator.choice([1, 1.0, 0.5])
        looked_up = kernels[0].looked_up
        native.started.clear()
        y, total = op(x, bias, factor, "wide")
        held.append((x, bias, y, total))
        assert y.shape == x.shape and y.dtype == torch.float32 and y.is_contiguous() and total.dtype == x.dtype
        assert total.shape == (0 if bias is None else rows,)
        if kernels[0].looked_up > looked_up:
            continue
        replayed += 1
        grid, arguments = native.started[0]
        parts = arguments[1]
        assert grid == (rows, 1, 1) and len(native.started) == (1 if bias is None else 2)
        assert arguments == (x.data_ptr(), parts, y.data_ptr(), (x.data_ptr(), rows, columns), factor, 16, False)
        assert type(arguments[4]) is type(factor)
        if bias is not None:
            second = (parts, parts + 4 * rows, total.data_ptr(), columns, 8)
            assert native.started[1] == ((2, 3, 1), second)
    assert replayed > 10 and len(checked) < 60
    assert len({held_y.data_ptr() for _, _, held_y, _ in held}) == 60  # outputs are new at each call


def test_a_process_without_plans_looks_every_launch_up(ops, monkeypatch):
    monkeypatch.setattr(kernel_op, "_plans_allowed", False)
    op, (kernel, _), checked = ops
    for _ in range(4):
        op(torch.randn(3, 8), None, 1.0, "wide")
    assert kernel.looked_up == len(checked) == 4 and op.plans is None


def test_an_import_alone_needs_no_private_names_of_plans():
    source = "import sys, distill_kernels; print('distill_kernels.launch_plans' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_arguments_of_another_description_are_checked(ops):
    op, _, _ = ops
    x = torch.randn(3, 8)
    for _ in range(4):
        op(x, None, 1.0, "wide")
    for _ in range(2):
        with pytest.raises(ValueError, match="factor: expected > 0, got -1"):
            op(x, None, -1.0, "wide")


def test_unaligned_tensors_go_to_tritons_lookup(ops, native):
    op, (kernel, _), _ = ops
    wide = torch.randn(3 * 8 + 1)
    for _ in range(4):
        op(wide[:24].view(3, 8), None, 1.0, "wide")
    assert kernel.looked_up == 2 and native.started[-1][1][0] == wide.data_ptr()
    started = len(native.started)
    op(wide[1:].view(3, 8), None, 1.0, "wide")
    assert kernel.looked_up == 3 and len(native.started) == started
    op(wide[:24].view(3, 8), None, 1.0, "wide")
    assert kernel.looked_up == 3 and len(native.started) == started + 1


def test_a_view_with_an_offset_is_addressed_where_it_begins(ops, native):
    op, (kernel, _), _ = ops
    whole = torch.randn(4, 3, 8)
    for part in whole:
        op(part, None, 1.0, "wide")
    assert kernel.looked_up == 2
    assert [arguments[0] for _, arguments in native.started] == [part.data_ptr() for part in whole[2:]]


@pytest.mark.parametrize("other", ["device", "stream"])
def test_another_device_or_stream_is_taken_up(ops, native, other, hardware):
    op, (kernel, _), _ = ops
    x = torch.randn(3, 8)
    now = {"device": -1, "stream": 7}
    hardware.setattr(launch_plans, "current_device", lambda: now["device"])
    hardware.setattr(launch_plans, "current_stream", lambda device: now["stream"])
    for _ in range(3):
        op(x, None, 1.0, "wide")
    started = len(native.started)
    now[other] = 8
    if other == "device":  # not that of the tensor: the launcher and Triton say what is wrong
        op(x, None, 1.0, "wide")
        assert kernel.looked_up == 3 and len(native.started) == started
    else:
        with pytest.raises(AssertionError):  # the stand-in saw another stream than 7
            op(x, None, 1.0, "wide")


def test_a_dispatch_mode_sees_the_op(ops):
    op, (kernel, _), _ = ops
    x = torch.randn(3, 8)
    for _ in range(3):
        op(x, None, 1.0, "wide")

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    names = []
    with Seen():
        op(x, None, 1.0, "wide")
    assert any(name.startswith("distill::test_plan") for name in names) and kernel.looked_up == 3
    op(x, None, 1.0, "wide")
    assert kernel.looked_up == 3


def test_no_plan_is_made_of_one_address_given_twice(native):
    kernel = Kernel(lambda x_ptr, other_ptr, y_ptr: None, native)

    def launcher(x, other):
        y = torch.empty_like(x)
        launch(kernel, (1,), x, other, y)
        return y

    op = PlannedFunction(launcher)
    x, other = torch.randn(8), torch.randn(8)
    for _ in range(4):
        op(x, x.detach())
    assert kernel.looked_up == 4
    for _ in range(2):
        y = op(x, other)
    assert kernel.looked_up == 5 and native.started[-1][1] == (x.data_ptr(), other.data_ptr(), y.data_ptr())
    y = op(other, other.detach())
    assert kernel.looked_up == 5 and native.started[-1][1] == (other.data_ptr(), other.data_ptr(), y.data_ptr())


def test_one_tensor_given_twice_goes_through_the_dispatcher(ops):
    op, (kernel, _), _ = ops
    x = torch.randn(8, 8)
    for _ in range(4):
        y, total = op(x, x, 1.0, "wide")
        assert y.shape == x.shape and total.shape == (8,)
    assert kernel.looked_up == 4 and op.plans.planned.plans() == []


KEPT = torch.zeros(4)
UNPLANNED = {
    "a copy": lambda x, go: go(x.t().contiguous(), torch.empty_like(x)),
    "a filled buffer": lambda x, go: go(x, torch.zeros_like(x)),
    "a part of an input": lambda x, go: go(x[1:], torch.empty_like(x)),
    "a tensor of its own": lambda x, go: go(x, torch.empty_like(x), KEPT),
    "a view as a result": lambda x, go: go(x, torch.empty_like(x))[1:],
    "an input as a result": lambda x, go: (go(x, torch.empty_like(x)), x)[1],
    "one result twice": lambda x, go: (go(x, torch.empty_like(x)),) * 2,
    "a launch that nobody noted": lambda x, go: go.unseen(x, torch.empty_like(x)),
}


@pytest.mark.parametrize("name", UNPLANNED)
def test_launches_that_a_plan_cannot_repeat_have_none(native, name):
    kernel = Kernel(lambda x_ptr, y_ptr, kept_ptr=None: None, native)

    def go(x, y, *more):
        launch(kernel, (1,), x, y, *more)
        return y

    def unseen(x, y):
        kernel[(1,)](x, y)
        return y

    go.unseen = unseen
    x = torch.randn(4, 4)
    refused, planned = (
        PlannedFunction(lambda x: UNPLANNED[name](x, go)),
        PlannedFunction(lambda x: go(x, torch.empty_like(x))),
    )
    for op in (refused, planned):
        op(x)
        op(x)
    (plan,), (other,) = refused.plans(), planned.plans()
    assert plan.replay is None and not plan.recordable and other.replay is not None


def test_a_function_without_a_plan_is_not_recorded_again(native):
    kernel = Kernel(lambda x_ptr, y_ptr: None, native)

    def launcher(x):
        y = torch.zeros_like(x)
        launch(kernel, (1,), x, y)
        return y

    op = PlannedFunction(launcher)
    for _ in range(5):
        op(torch.randn(8))
    (plan,) = op.plans()
    assert kernel.looked_up == 5 and plan.replay is None and not plan.recordable


def test_an_op_that_says_so_is_never_recorded(native, request):
    kernel = Kernel(lambda x_ptr, y_ptr: None, native)

    def launcher(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        launch(kernel, (1,), x, y)
        return y

    op = KernelOp(request.node.name, launcher, torch.empty_like, planned=False)
    x = torch.randn(8)
    for _ in range(4):
        op(x)
        op.all_outputs(x)
    assert kernel.looked_up == 8 and op.plans is None


def test_outputs_without_elements_are_new_at_each_call(native):
    kernel = Kernel(lambda x_ptr, y_ptr: None, native)

    def launcher(x):
        y = torch.empty_like(x)
        launch(kernel, (1,), x, y)
        return y, x.new_empty(0), x.new_empty(2, 0)

    op, x = PlannedFunction(launcher), torch.randn(8)
    held = [op(x) for _ in range(4)]
    assert kernel.looked_up == 2 and all(parts[1].shape == (0,) and parts[2].shape == (2, 0) for parts in held)
    assert len({id(part) for parts in held for part in parts}) == 12
    empty = torch.randn(0, 8)
    assert [op(empty)[0].shape for _ in range(4)] == [(0, 8)] * 4


def test_tensor_maps_are_made_once_an_address(native):
    kernel = Kernel(lambda x_tiles, y_ptr, BLOCK: None, native)

    def launcher(x):
        y = torch.empty_like(x)
        launch(kernel, (1,), TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 16]), y, 16)
        return y

    op, (x, other) = PlannedFunction(launcher), torch.randn(2, 3, 16)
    for tensor in (x, x, x, other, x, other):
        op(tensor)
    assert kernel.looked_up == 2
    maps = [arguments[0] for _, arguments in native.started]
    assert [made.address for made in maps] == [tensor.data_ptr() for tensor in (x, other, x, other)]
    assert maps[0] is maps[2] and maps[1] is maps[3] and maps[0].description == maps[1].description
    assert all(arguments[1:5] == (3, 16, 16, 1) for _, arguments in native.started)  # shape and strides follow each


def test_a_profiler_of_triton_sees_every_launch(ops):
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


def test_a_launcher_of_another_form_is_named_once_and_never_planned(native, caplog):
    kernel = Kernel(lambda x_ptr, y_ptr: None, native)

    class Launcher:
        def __call__(self, *args): ...

    compile_as_usual = kernel.compile

    def compile(grid, values):
        compiled = compile_as_usual(grid, values)
        compiled.run = Launcher()
        return compiled

    kernel.compile = compile
    for _ in range(2):
        op = PlannedFunction(lambda x: launch(kernel, (1,), x, torch.empty_like(x)))
        for _ in range(4):
            op(torch.randn(8))
        assert [plan.replay for plan in op.plans()] == [None]
    assert caplog.text.count("Triton's Launcher has a form unknown here") == 1 and kernel.looked_up == 8
