"""Launches of FusedAdamW: once a step, twice if large; tables reused while valid, steps counted on the device."""

from pathlib import Path

import pytest
import torch
from compile_for_gpu import compiled
from distill_kernels.launch import interpreted
from distill_kernels.optim import adamw_kernels, multi_tensor
from distill_kernels.optim.adamw import BLOCK, FusedAdamW
from distill_kernels.optim.multi_tensor import CachedLauncher
from helpers import assert_as_good_as_torch, kernels_launched, ops_called

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}


class Compiled:
    """Stands for a compiled kernel: notes what it is called with."""

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return lambda *args: self.calls.append((grid, args))


class Kernel:
    """Stands for a `triton.jit` function on a GPU: notes launches and hands out what it compiled."""

    def __init__(self):
        self.launches, self.compiled = [], []

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.launches.append((grid, args, options))
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return launch

    def counts(self):
        return len(self.launches), [len(compiled.calls) for compiled in self.compiled]


def make(shapes, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]


def set_gradients(params, step):
    generator = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.device)


def test_later_launches_go_to_the_compiled_kernel_with_addresses():
    launch, kernel = CachedLauncher(), Kernel()
    first, second = torch.ones(4), torch.ones(8)
    launch(kernel, 3, "a", [first, second], (0.5, 7), num_warps=8)
    assert kernel.launches == [((3,), (first, second, 0.5, 7), {"num_warps": 8})]
    launch(kernel, 3, "a", [second, first], (0.25, 7), num_warps=8)
    launch(kernel, 3, "a", [first, first], (0.125, 7), num_warps=8)
    assert kernel.compiled[0].calls == [
        ((3, 1, 1), (second.data_ptr(), first.data_ptr(), 0.25, 7)),
        ((3, 1, 1), (first.data_ptr(), first.data_ptr(), 0.125, 7)),
    ]
    launch(kernel, 3, "b", [first, second], (0.5, 7), num_warps=8)  # of another kind, over another grid: looked up
    launch(kernel, 4, "a", [first, second], (0.5, 7), num_warps=8)
    assert kernel.counts() == (3, [2, 0, 0])


def test_a_step_is_one_launch(hardware):
    kernel, squares = Kernel(), Kernel()
    hardware.setattr(adamw_kernels, "adamw_kernel", kernel)
    hardware.setattr(multi_tensor, "sum_of_squares_kernel", squares)
    params = make([(64,), (128,), (32, 16)])
    set_gradients(params, 0)
    optimizer = FusedAdamW(params, **SETTINGS)
    with interpreted():
        for step in range(4):
            optimizer.param_groups[0]["lr"] = 1e-3 * step  # as a schedule does
            optimizer.step()
        assert kernel.counts() == (1, [3]) and squares.counts() == (0, [])
        tensors = 8
        assert [args[tensors] for _, args in kernel.compiled[0].calls] == [1e-3, 2e-3, 3e-3]
        optimizer.found_inf = torch.zeros(())  # another kind of launch, not a wrong one
        optimizer.step()
        assert kernel.counts() == (2, [3, 0])
        optimizer.options = optimizer.options._replace(max_grad_norm=1.0)
        optimizer.step()
        optimizer.step()
        assert kernel.counts() == (3, [3, 0, 1]) and squares.counts() == (1, [1])


def test_many_programs_use_a_separate_counting_launch(limit):
    with interpreted():
        for programs, launches in ((4, 1), (5, 0)):
            limit.setattr(adamw_kernels, "OWN_COUNT_PROGRAMS", programs)
            params = make([(3 * BLOCK,), (16,)])
            set_gradients(params, 0)
            with kernels_launched() as launched:
                FusedAdamW(params, **SETTINGS).step()
            assert launched.count("count_kernel") == launches and launched.count("adamw_kernel") == 1


def test_tables_are_reused_until_an_address_changes():
    params = make([(64,), (128,)])
    set_gradients(params, 0)
    kept = [p.grad for p in params]
    optimizer = FusedAdamW(params, **SETTINGS)

    def uploads():
        """Return the number of tables of addresses and sizes that a step makes."""
        with ops_called("aten::lift_fresh") as made:
            optimizer.step()
        return sum(table.result.dtype == torch.int64 for table in made)

    with interpreted():
        assert uploads() == 3  # parameters, blocks and gradients
        assert uploads() == 0
        set_gradients(params, 1)
        assert uploads() == 1
        assert optimizer._plans[0].buckets[0].gradients.tolist() == [p.grad.data_ptr() for p in params]
        optimizer.state[params[0]]["exp_avg"] = optimizer.state[params[0]]["exp_avg"].clone()
        assert uploads() == 3
    assert kept  # their addresses were not given to others meanwhile


def test_a_gradient_of_another_layout_at_the_same_address(kernel_device):
    ours, eager = make([(16, 16)], kernel_device), make([(16, 16)])
    optimizers = FusedAdamW(ours, **SETTINGS), torch.optim.AdamW(eager, **SETTINGS)
    for params, optimizer in zip((ours, eager), optimizers, strict=True):
        set_gradients(params, 0)
        optimizer.step()
        params[0].grad = params[0].grad.t()
        optimizer.step()
    assert_as_good_as_torch(ours[0], eager[0], eager[0], torch.float32)


@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 0.5, "skip_nonfinite": True}])
def test_steps_counted_by_a_second_launch_are_the_same(kernel_device, limit, settings):
    shapes = [(5000,), (7,), (0,), ()]
    results = []
    for apart in (1, 10**9):
        limit.setattr(adamw_kernels, "OWN_COUNT_PROGRAMS", apart)
        params = make(shapes, kernel_device)
        optimizer = FusedAdamW(params, **SETTINGS, **settings)
        for step in range(6):
            set_gradients(params, step)
            if step == 2 and settings:
                params[0].grad[0] = float("nan")  # this step is skipped
            if step == 3:  # as torch.amp.GradScaler asks: this one too
                optimizer.found_inf = torch.ones((), device=kernel_device)
            if step == 4:
                optimizer.found_inf.zero_()
                optimizer.param_groups[0]["betas"] = (0.8, 0.95)
            optimizer.step()
        taken = 4 if settings else 5
        assert [optimizer.state[p]["step"].item() for p in params] == [taken] * len(shapes)
        rows = torch.cat([bucket.rows for bucket in optimizer._plans[0].buckets])
        results.append([p.detach() for p in params] + [rows])
    for ours, others in zip(*results, strict=True):
        assert torch.equal(ours, others)


@pytest.mark.parametrize("change", ["nothing", "betas", "step"])
def test_bias_corrections_use_the_current_step_and_betas(kernel_device, change):
    """Bias corrections left by a launch are not used when step or betas change."""
    shapes = [(5000,), (7,), (0,), ()]
    ours, eager = make(shapes, kernel_device), make(shapes)
    optimizers = FusedAdamW(ours, **SETTINGS), torch.optim.AdamW(eager, **SETTINGS)
    for params, optimizer in zip((ours, eager), optimizers, strict=True):
        for step in range(4):
            set_gradients(params, step)
            if step == 2 and change == "betas":
                optimizer.param_groups[0]["betas"] = (0.8, 0.95)
            if step == 2 and change == "step":
                optimizer.state[params[0]]["step"].fill_(100)
            optimizer.step()
    for p, q in zip(ours, eager, strict=True):
        assert_as_good_as_torch(p, q, q, torch.float32)
        assert optimizers[0].state[p]["step"].item() == optimizers[1].state[q]["step"].item()
    rows = torch.cat([bucket.rows for bucket in optimizers[0]._plans[0].buckets])
    assert rows[:, 6].tolist() == [0.0] * len(shapes)  # no program is counted as unfinished
    assert torch.equal(rows[:, 1], rows[:, 0] + 1)


def test_hooks_and_closures_are_called(kernel_device):
    params = make([(64,)], kernel_device)
    optimizer, said = FusedAdamW(params, **SETTINGS), []
    optimizer.register_step_pre_hook(lambda *_: said.append("before"))
    optimizer.register_step_post_hook(lambda *_: said.append("after"))

    def closure():
        assert torch.is_grad_enabled()
        loss = params[0].square().sum()
        loss.backward()
        said.append("closure")
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() > 0
    assert said == ["before", "closure", "after"]
    assert all(not tensor.requires_grad for tensor in optimizer.state[params[0]].values())


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 0.5, "skip_nonfinite": True}])
@pytest.mark.parametrize("apart", [1, 10**9])
def test_replays_in_a_cuda_graph_count_steps(settings, apart, limit):
    limit.setattr(adamw_kernels, "OWN_COUNT_PROGRAMS", apart)
    shapes = [(100_000,), (33, 7), (1,)]
    ours, eager = make(shapes, "cuda"), make(shapes, "cuda")
    optimizer, plain = FusedAdamW(ours, **SETTINGS, **settings), FusedAdamW(eager, **SETTINGS, **settings)
    for params in (ours, eager):
        set_gradients(params, 0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(5):
        graph.replay()
    for _ in range(7):
        plain.step()
    for p, q in zip(ours, eager, strict=True):
        assert torch.equal(p, q)
        assert optimizer.state[p]["step"].item() == 7


SNIPPET = """
from distill_kernels.optim import adamw_kernels
from distill_kernels.optim.adamw import FusedAdamW
for dtype, settings in (
    (torch.float32, {}),
    (torch.bfloat16, {}),
    (torch.bfloat16, {"stochastic_rounding": True, "max_grad_norm": 1.0, "skip_nonfinite": True}),
):
    p = torch.nn.Parameter(torch.ones(4096, dtype=dtype))
    p.grad = torch.ones_like(p)
    for adamw_kernels.OWN_COUNT_PROGRAMS in (1, 10**9):
        FusedAdamW([p], **settings).step()
"""


@pytest.mark.full
def test_compiles_for_a_gpu_without_spilling(tmp_path):
    kernels = [each for each in compiled("sm_90", SNIPPET, TRITON_CACHE_DIR=str(tmp_path)) if "adamw" in each.kernel]
    assert len(kernels) == 6, kernels
    for kernel in kernels:
        assert kernel.spilled == 0
        assert kernel.registers <= 48  # five blocks of eight warps a multiprocessor
