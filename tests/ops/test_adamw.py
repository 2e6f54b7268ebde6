"""FusedAdamW against torch.optim.AdamW: arithmetic, rounding, clipping, state dicts, moving tensors, shards."""

import copy
import logging

import pytest
import torch
from distill_kernels.launch import tl, triton
from distill_kernels.optim.adamw import FusedAdamW
from distill_kernels.optim.multi_tensor import block_map, is_dense
from distill_kernels.optim.stochastic_rounding import (
    PHILOX_ROUNDS,
    random16,
    reference_random16,
    reference_stochastic_round,
    stochastic_round,
)
from helpers import assert_as_good_as_torch

SHAPES = [(64, 128), (1,), (), (33, 7), (4096,), (4097,), (3, 5, 16), (0,)]
SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def make(shapes=SHAPES, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in shapes]


def set_gradients(params, step, dtype=None, scale=1.0):
    """Gradients spread over six orders of magnitude, a function of `step` and position only, rounded as `dtype`."""
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        values = torch.randn(p.shape, generator=generator) * 10 ** (6 * torch.rand(p.shape, generator=generator) - 5)
        p.grad = (values * scale).to(dtype or p.dtype).to(p.dtype).to(p.device)


def train(params, optimizer, steps, first=0, dtype=None, scale=1.0):
    for step in range(first, first + steps):
        set_gradients(params, step, dtype, scale)
        optimizer.step()
    return params


def flat(tensors):
    return torch.cat([tensor.detach().double().flatten().cpu() for tensor in tensors])


@pytest.fixture(params=["kernel", "reference"])
def any_device(request):
    return request.getfixturevalue("kernel_device") if request.param == "kernel" else torch.device("cpu")


@pytest.mark.plain(
    "kernel-False-torch.float32",
    "kernel-False-torch.float16",
    "kernel-True-torch.bfloat16",
    "reference-False-torch.bfloat16",
    "reference-True-torch.float32",
    "reference-True-torch.float16",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("maximize", [False, True])
def test_updates_equal_torchs(any_device, dtype, maximize):
    settings = {**SETTINGS, "maximize": maximize}
    ours = make(dtype=dtype, device=any_device)
    optimizer = FusedAdamW(ours, **settings)
    train(ours, optimizer, 4)
    eager = make(dtype=dtype)
    torch_optimizer = torch.optim.AdamW(eager, foreach=False, **settings)
    train(eager, torch_optimizer, 4)
    exact = [torch.nn.Parameter(p.double()) for p in make(dtype=dtype)]
    exact_optimizer = torch.optim.AdamW(exact, **settings)
    train(exact, exact_optimizer, 4, dtype=dtype)
    start = flat(make(dtype=dtype))
    assert_as_good_as_torch(flat(ours), flat(eager), flat(exact), dtype, "parameters")
    # what moved, rather than the weights that it moved: a wrong step would hide behind large weights
    assert_as_good_as_torch(flat(ours) - start, flat(eager) - start, flat(exact) - start, dtype, "updates")
    trained = ((optimizer, ours), (torch_optimizer, eager), (exact_optimizer, exact))
    for name in ("exp_avg", "exp_avg_sq", "step"):
        values = [flat([opt.state[p][name] for p in params if p.numel()]) for opt, params in trained]
        assert_as_good_as_torch(*values, dtype, name)


@pytest.mark.plain(
    "kernel-torch.float32-torch.float32",
    "kernel-torch.bfloat16-torch.float32",
    "reference-torch.float32-torch.bfloat16",
    "reference-torch.bfloat16-torch.bfloat16",
)
@pytest.mark.parametrize("parameter", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_states_of_another_dtype(any_device, parameter, state):
    params = make(dtype=parameter, device=any_device)
    optimizer = FusedAdamW(params, state_dtype=state, **SETTINGS)
    train(params, optimizer, 3)
    assert {optimizer.state[p]["exp_avg_sq"].dtype for p in params} == {state}
    eager = make(dtype=parameter)
    train(eager, torch.optim.AdamW(eager, **SETTINGS), 3)
    exact = [torch.nn.Parameter(p.double()) for p in make(dtype=parameter)]
    train(exact, torch.optim.AdamW(exact, **SETTINGS), 3, dtype=parameter)
    worse = torch.bfloat16 if torch.bfloat16 in (parameter, state) else torch.float32
    assert_as_good_as_torch(flat(params), flat(eager), flat(exact), worse)


def test_master_weights_follow_fp32_training(any_device):
    params = make(dtype=torch.bfloat16, device=any_device)
    optimizer = FusedAdamW(params, master_weights=True, state_dtype=torch.float32, **SETTINGS)
    train(params, optimizer, 5)
    exact = [torch.nn.Parameter(p.float()) for p in make(dtype=torch.bfloat16)]
    train(exact, torch.optim.AdamW(exact, **SETTINGS), 5, dtype=torch.bfloat16)
    masters = [optimizer.state[p]["master"] for p in params]
    assert_as_good_as_torch(flat(masters), flat(exact), flat(exact), torch.float32)
    for p, master in zip(params, masters, strict=True):
        assert torch.equal(p, master.to(torch.bfloat16))


@triton.jit
def rounding_kernel(values_ptr, rounded_ptr, random_ptr, seed, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = first + tl.arange(0, BLOCK)
    random = random16(seed, 3, 7, first, BLOCK, ROUNDS)
    tl.store(random_ptr + offsets, random.to(tl.int32))
    tl.store(rounded_ptr + offsets, stochastic_round(tl.load(values_ptr + offsets), random))


@pytest.mark.parametrize("seed", [0, 1, 16, 123456789012345])
def test_kernel_and_reference_use_the_same_random_numbers(kernel_device, seed):
    values = torch.randn(512, device=kernel_device)
    values[:4] = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0])
    rounded = torch.empty(512, dtype=torch.bfloat16, device=kernel_device)
    random = torch.empty(512, dtype=torch.int32, device=kernel_device)
    rounding_kernel[(4,)](values, rounded, random, seed, BLOCK=128, ROUNDS=PHILOX_ROUNDS)
    expected = reference_random16(seed, 3, 7, 512)
    assert torch.equal(random.cpu(), expected)
    torch.testing.assert_close(
        rounded.cpu(), reference_stochastic_round(values.cpu(), expected), rtol=0, atol=0, equal_nan=True
    )


def test_random_numbers_are_uniform_and_independent():
    draws = torch.stack([reference_random16(5, tensor, step, 8192) for tensor in (0, 1) for step in (1, 2)]).double()
    deviation = 65536 / 12**0.5
    assert (draws.mean(1) - 32767.5).abs().max() < 5 * deviation / 8192**0.5
    correlation = torch.corrcoef(torch.cat([draws, draws.roll(1, dims=1)]))
    assert (correlation - torch.eye(8, dtype=torch.float64)).abs().max() < 5 / 8192**0.5


def test_stochastic_rounding_updates_weights_that_nearest_rounding_does_not(any_device):
    """30 updates of 1/64 of the spacing: nothing by rounding to nearest, the right sum on average by chance."""
    size, steps, lr = 4096, 30, 2.0**-14
    settings = {"lr": lr, "weight_decay": 0.0, "betas": (0.0, 0.999), "state_dtype": torch.float32}
    for chance in (False, True):
        p = torch.nn.Parameter(torch.full((size,), 1.5, dtype=torch.bfloat16, device=any_device))
        optimizer = FusedAdamW([p], stochastic_rounding=chance, **settings)
        for _ in range(steps):
            p.grad = torch.ones_like(p)
            optimizer.step()
        moved = 1.5 - p.double().mean().item()
        if chance:
            spread = 2.0**-7 * (steps / 128 * (1 - 1 / 128)) ** 0.5 / size**0.5
            assert abs(moved - steps * lr) < 5 * spread
        else:
            assert moved == 0


def test_stochastic_rounding_lets_a_bf16_second_moment_decay(any_device):
    def second_moment(chance):
        p = torch.nn.Parameter(torch.ones(2048, dtype=torch.bfloat16, device=any_device))
        optimizer = FusedAdamW([p], lr=1e-3, stochastic_rounding=chance)
        for gradient in [1.0] + [0.0] * 25:
            p.grad = torch.full_like(p, gradient)
            optimizer.step()
        return optimizer.state[p]["exp_avg_sq"].double().mean().item()

    exact = 1e-3 * 0.999**25
    assert abs(second_moment(True) / exact - 1) < 2e-3
    assert abs(second_moment(False) / exact - 1) > 1e-2


def test_stochastic_rounding_repeats_and_depends_on_seed_and_position(any_device):
    def run(seed):
        params = [torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16, device=any_device)) for _ in range(2)]
        optimizer = FusedAdamW(params, lr=1e-3, weight_decay=0.0, stochastic_rounding=True, seed=seed)
        for _ in range(2):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
        return [p.detach().cpu() for p in params]

    first, again, other = run(1), run(1), run(2)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0]) and not torch.equal(first[0], first[1])


@pytest.mark.parametrize("max_norm, clips", [(0.5, True), (1e9, False)])
def test_clips_over_all_groups_as_torch(any_device, max_norm, clips):
    ours, eager = make(device=any_device), make()
    optimizer = FusedAdamW(
        [{"params": ours[:3], "weight_decay": 0.0}, {"params": ours[3:]}], max_grad_norm=max_norm, **SETTINGS
    )
    torch_optimizer = torch.optim.AdamW([{"params": eager[:3], "weight_decay": 0.0}, {"params": eager[3:]}], **SETTINGS)
    for step in range(3):
        set_gradients(ours, step)
        set_gradients(eager, step)
        norm = torch.nn.utils.clip_grad_norm_(eager, max_norm)
        assert (norm > max_norm) == clips
        torch_optimizer.step()
        optimizer.step()
        assert_as_good_as_torch(optimizer.grad_norm, norm, norm, torch.float32, "norm")
    assert_as_good_as_torch(flat(ours), flat(eager), flat(eager), torch.float32)


@pytest.mark.plain("kernel-nan", "kernel--inf", "reference--inf")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_skips_a_step_that_is_not_finite(any_device, bad):
    params = make(device=any_device)
    optimizer = FusedAdamW(params, skip_nonfinite=True, max_grad_norm=1.0, **SETTINGS)
    train(params, optimizer, 2)
    before = copy.deepcopy([(p.detach(), optimizer.state[p]) for p in params])
    set_gradients(params, 2)
    params[4].grad[4000] = bad
    optimizer.step()
    for p, (value, state) in zip(params, before, strict=True):
        assert torch.equal(p, value)
        assert all(torch.equal(optimizer.state[p][name], state[name]) for name in state)
    train(params, optimizer, 1, first=3)
    assert optimizer.state[params[0]]["step"].item() == 3
    assert not torch.equal(params[0], before[0][0])


def test_without_skipping_a_nan_reaches_the_weights(any_device):
    params = make(device=any_device)
    optimizer = FusedAdamW(params, max_grad_norm=1.0, **SETTINGS)
    set_gradients(params, 0)
    params[0].grad[0, 0] = float("nan")
    optimizer.step()
    assert all(p.isnan().all() for p in params)


def test_scaled_gradients_of_a_grad_scaler(any_device):
    params, eager = make(device=any_device), make()
    optimizer = FusedAdamW(params, max_grad_norm=1.0, **SETTINGS)
    optimizer.grad_scale = torch.tensor(1024.0, device=any_device)
    optimizer.found_inf = torch.tensor(0.0, device=any_device)
    train(params, optimizer, 2, scale=1024.0)
    torch_optimizer = torch.optim.AdamW(eager, **SETTINGS)
    for step in range(2):
        set_gradients(eager, step)
        torch.nn.utils.clip_grad_norm_(eager, 1.0)
        torch_optimizer.step()
    assert_as_good_as_torch(flat(params), flat(eager), flat(eager), torch.float32)
    optimizer.found_inf.fill_(1.0)
    before = flat(params)
    train(params, optimizer, 1, first=2)
    assert torch.equal(flat(params), before)


@pytest.mark.plain("kernel-foreach", "reference-fused")
@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_state_dicts_load_from_and_into_torchs_adamw(any_device, kind):
    def torch_optimizer(params):
        return torch.optim.AdamW(params, foreach=kind == "foreach" or None, fused=kind == "fused" or None, **SETTINGS)

    for first, second in ((FusedAdamW, torch_optimizer), (torch_optimizer, FusedAdamW), (FusedAdamW, FusedAdamW)):
        params = make(device=any_device)
        before = first(params, **SETTINGS) if first is FusedAdamW else first(params)
        train(params, before, 2)
        after = second(params, **SETTINGS) if second is FusedAdamW else second(params)
        saved = before.state_dict()
        assert set(saved["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
        assert set(saved["param_groups"][0]) == set(torch_optimizer(make()).state_dict()["param_groups"][0])
        after.load_state_dict(copy.deepcopy(saved))
        train(params, after, 2, first=2)
        eager = make()
        train(eager, torch.optim.AdamW(eager, **SETTINGS), 4)
        assert_as_good_as_torch(flat(params), flat(eager), flat(eager), torch.float32, f"{first} then {second}")


def test_loading_respects_hooks_and_copies_the_state():
    params, others = make(), make()
    first, second = FusedAdamW(params, **SETTINGS), FusedAdamW(others, **SETTINGS)
    train(params, first, 1)
    second.register_load_state_dict_pre_hook(lambda _, given: given["other"])
    second.load_state_dict({"other": first.state_dict()})
    for name, saved in first.state[params[0]].items():
        loaded = second.state[others[0]][name]
        assert torch.equal(loaded, saved) and loaded.data_ptr() != saved.data_ptr()


@pytest.mark.plain("kernel-state_dict", "reference-deepcopy")
@pytest.mark.parametrize("copying", ["state_dict", "deepcopy"])
def test_resumes_bit_for_bit(any_device, copying):
    settings = {**SETTINGS, "state_dtype": torch.float32, "stochastic_rounding": True, "seed": 9}
    whole = make(dtype=torch.bfloat16, device=any_device)
    train(whole, FusedAdamW(whole, **settings), 4)
    parts = make(dtype=torch.bfloat16, device=any_device)
    optimizer = FusedAdamW(parts, **settings)
    train(parts, optimizer, 2)
    if copying == "deepcopy":
        parts, resumed = copy.deepcopy((parts, optimizer))
    else:
        resumed = FusedAdamW(parts, **settings)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.state[parts[0]]["exp_avg"].dtype == torch.float32
    train(parts, resumed, 2, first=2)
    assert torch.equal(flat(parts), flat(whole))


def test_parameters_may_move_be_added_or_lose_gradients(any_device):
    """Gradients of other addresses, frozen and thawed parameters, states and parameters put elsewhere."""
    ours, eager = make(device=any_device), make()
    optimizer, torch_optimizer = FusedAdamW(ours, **SETTINGS), torch.optim.AdamW(eager, **SETTINGS)
    for step in range(5):
        for params, opt in ((ours, optimizer), (eager, torch_optimizer)):
            set_gradients(params, step)
            if step in (1, 3):
                params[0].grad = params[4].grad = None
            if step == 2:
                for p in params:
                    p.data = p.data.clone()
                    opt.state[p]["exp_avg"] = opt.state[p]["exp_avg"].clone()
                    opt.state[p]["exp_avg_sq"].data = opt.state[p]["exp_avg_sq"].clone()
            if step == 4:
                params.append(torch.nn.Parameter(torch.ones_like(params[0])))
                params[-1].grad = torch.ones_like(params[-1])
                opt.add_param_group({"params": [params[-1]], "lr": 0.5})
            opt.step()
    assert optimizer.state[ours[0]]["step"].item() == 3
    assert_as_good_as_torch(flat(ours), flat(eager), flat(eager), torch.float32)


def test_gradients_are_freed_when_set_to_none(any_device):
    import weakref

    params = make(device=any_device)
    optimizer = FusedAdamW(params, **SETTINGS)
    train(params, optimizer, 1)
    gradient = weakref.ref(params[0].grad)
    optimizer.zero_grad()
    assert gradient() is None


def test_transposed_and_strided_parameters_take_the_same_steps(any_device, caplog):
    """Transposed parameters stay with the kernel; slices with holes go to the reference, and a GPU says so."""

    def layouts(device):
        base = make([(48, 64), (48, 64)], device=device)
        return [torch.nn.Parameter(base[0].data.t()), torch.nn.Parameter(base[1].data[:, ::2])]

    ours, eager = layouts(any_device), layouts("cpu")
    with caplog.at_level(logging.WARNING):
        train(ours, FusedAdamW(ours, **SETTINGS), 3)
    train(eager, torch.optim.AdamW(eager, **SETTINGS), 3)
    assert_as_good_as_torch(flat(ours), flat(eager), flat(eager), torch.float32)
    assert ("PyTorch reference" in caplog.text) == (any_device.type == "cuda")


def test_learning_rate_as_tensor_and_by_schedule(any_device):
    ours, eager = make(device=any_device), make()
    optimizer = FusedAdamW(ours, **{**SETTINGS, "lr": torch.tensor(3e-3, device=any_device)})
    torch_optimizer = torch.optim.AdamW(eager, **SETTINGS)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(opt, 0.5) for opt in (optimizer, torch_optimizer)]
    for step in range(3):
        train(ours, optimizer, 1, first=step)
        train(eager, torch_optimizer, 1, first=step)
        for schedule in schedules:
            schedule.step()
    assert_as_good_as_torch(flat(ours), flat(eager), flat(eager), torch.float32)


@pytest.mark.plain("kernel")
def test_many_tensors_of_mixed_dtypes_share_launches(any_device):
    shapes = [(1 + 7 * i % 61,) for i in range(120)]
    ours, eager = make(shapes, device=any_device), make(shapes)
    for params in (ours, eager):
        params += make(shapes[:40], dtype=torch.bfloat16, device=params[0].device)
    optimizer = FusedAdamW(ours, **SETTINGS)
    train(ours, optimizer, 2)
    train(eager, torch.optim.AdamW(eager, **SETTINGS), 2)
    assert_as_good_as_torch(flat(ours[:120]), flat(eager[:120]), flat(eager[:120]), torch.float32)
    assert_as_good_as_torch(flat(ours[120:]), flat(eager[120:]), flat(eager[120:]), torch.bfloat16)
    assert len(optimizer._plans[0].buckets) <= 4  # two dtypes, of sizes that divide by 16 and not


def test_helpers_of_the_table():
    assert block_map([5, 0, 4, 1], 4).tolist() == [[0, 0], [0, 1], [1, 0], [2, 0], [3, 0]]
    assert is_dense(torch.empty(3, 4).t()) and is_dense(torch.empty(2, 1, 3)) and is_dense(torch.empty(()))
    assert not is_dense(torch.empty(3, 4)[:, ::2]) and not is_dense(torch.empty(3, 1).expand(3, 4))


@pytest.mark.parametrize(
    "settings, field",
    [
        ({"amsgrad": True}, "amsgrad"),
        ({"state_dtype": torch.float64}, "state_dtype"),
        ({"seed": -1}, "seed"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm"),
    ],
)
def test_wrong_arguments_are_named(settings, field):
    with pytest.raises(ValueError, match=f"{field}: expected .* got"):
        FusedAdamW(make(), **settings)


def test_unsupported_parameters_are_refused():
    p = torch.nn.Parameter(torch.ones(4, 4))
    p.grad = torch.eye(4).to_sparse()
    with pytest.raises(ValueError, match="dense gradients"):
        FusedAdamW([p]).step()
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="floating-point parameters"):
        FusedAdamW([p]).step()
    with pytest.raises(ValueError, match="amsgrad"):
        FusedAdamW([{"params": [p], "amsgrad": True}])
