"""Device facts: a GPU's family, its shared memory, and the paths taken without its instructions."""

from types import SimpleNamespace

import pytest
import torch
from distill_kernels import flash_attention, launch
from distill_kernels.extras.tiled_linear import TILES, choose_tile
from distill_kernels.launch import FAMILIES, INTERPRETER, OLDER, UNKNOWN, DeviceFacts, family_of

from distill.models.gpu_specs import GPU_SPECS
from scripts import gpu_page


@pytest.fixture
def gpu(monkeypatch):
    """Makes facts of a GPU that is not there."""

    def of(capability: tuple[int, int], shared: int = 227 << 10) -> DeviceFacts:
        properties = SimpleNamespace(
            name="NVIDIA X",
            major=capability[0],
            minor=capability[1],
            multi_processor_count=132,
            shared_memory_per_block=48 << 10,
            shared_memory_per_block_optin=shared,
            L2_cache_size=50 << 20,
            total_memory=80 << 30,
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        launch._cuda_facts.cache_clear()
        return launch.device_facts(torch.device("cuda", 0))

    yield of
    launch._cuda_facts.cache_clear()


@pytest.mark.parametrize(
    "capability, family",
    [
        ((7, 0), OLDER),
        ((7, 5), OLDER),
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90"),
        ((10, 0), "sm_100"),
        ((10, 3), "sm_100"),
        ((12, 0), "sm_120"),
        ((12, 1), "sm_120"),
        ((13, 0), UNKNOWN),
    ],
)
def test_families_follow_from_the_capability(gpu, capability, family):
    facts = gpu(capability)
    assert facts.family == family_of(capability) == family
    assert facts.has_kernels == (family in FAMILIES)
    assert facts.tma == facts.dependent_launch == (family in ("sm_90", "sm_100", "sm_120"))
    assert facts.fp8 == (family in ("sm_89", "sm_90", "sm_100", "sm_120"))
    assert facts.shared_bytes == 227 << 10, "what the driver says"


def test_families_of_amd_follow_from_the_architecture():
    assert family_of((9, 4), "gfx942:sramecc+:xnack-") == "gfx942"
    assert family_of((11, 0), "gfx1100") == UNKNOWN
    assert FAMILIES["gfx942"].warp_size == 64


def test_a_gpu_without_kernels_runs_pytorch_with_one_log_line(gpu, caplog):
    class OnGpu(torch.Tensor):
        is_cuda = True

        def get_device(self):
            return 0

    tensor = torch.empty(1).as_subclass(OnGpu)
    gpu((7, 5))
    assert not launch.runs_on_triton(tensor) and not launch.runs_on_triton(tensor)
    assert [record.getMessage() for record in caplog.records] == [
        "NVIDIA X: no kernels for GPUs as old or as new as this; PyTorch computes instead"
    ]
    gpu((8, 0))
    assert launch.runs_on_triton(tensor)


def test_environment_variable_forces_a_family(gpu, monkeypatch, caplog):
    monkeypatch.setenv("DISTILL_FAMILY", "sm_86")
    facts = gpu((9, 0))
    assert facts.family == "sm_86" and facts.shared_bytes == 99 << 10 and not facts.tma
    assert caplog.records[0].getMessage() == "NVIDIA X: takes the paths of sm_86 (DISTILL_FAMILY)"
    monkeypatch.setenv("DISTILL_FAMILY", INTERPRETER)
    with pytest.raises(ValueError, match=r"DISTILL_FAMILY: expected one of sm_80, .*, got interpreter"):
        gpu((9, 0))


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"window": 30, "softcap": 5.0}, {"packed": True}], ids=str)
@pytest.mark.parametrize("size", [16, 20])
def test_attention_through_pointers_equals_that_by_tma(kernel_device, monkeypatch, size, options):
    """Pointer-based loads, of families without TMA, give the same bits."""
    options = dict(options)
    if options.pop("packed", False):
        options["cu_seqlens_q"] = torch.tensor([0, 11, 45], device=kernel_device)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 45, size, generator=generator).to(kernel_device) for heads in (4, 2, 2))

    def results():
        tracked = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        out = flash_attention(*tracked, **options)
        return out, *torch.autograd.grad(out.square().sum(), tracked)

    family = launch.device_facts(kernel_device).family
    uses_tma = results()
    monkeypatch.setitem(FAMILIES, family, FAMILIES[family]._replace(tma=False))
    for one, other in zip(results(), uses_tma, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("family", ["sm_90", "sm_120"])
def test_tiles_of_products_fit(family):
    facts = DeviceFacts(132, family, FAMILIES[family].shared_bytes, 50 << 20, 80 << 30)
    for rows, columns in ((65, 64), (1024, 1024), (8192, 28672)):
        tile = choose_tile(rows, columns, facts)
        assert tile.stages >= 2
        taken = 2 * 64 * (tile.rows + tile.columns) * tile.stages + 2 * tile.rows * tile.columns
        assert taken <= facts.shared_bytes
    assert (choose_tile(8192, 28672, facts) == TILES[0]) == (family == "sm_90")


def test_predicted_loss_times_hold_where_they_were_measured():
    """The newest H100 and H200 rows lie within 5 % of what data sheets predict, and every family has a reason."""
    ratios = dict(gpu_page.measured_ratios())
    assert len(ratios) == 2
    for gpu, measured in ratios.items():
        least, most = gpu_page.predicted_ratios(GPU_SPECS[gpu.split()[1]])
        assert least == most and abs(measured / least - 1) < 0.05, (gpu, measured, least)
    assert gpu_page.CONFIDENCE.keys() == FAMILIES.keys() - {INTERPRETER, "sm_90"}
