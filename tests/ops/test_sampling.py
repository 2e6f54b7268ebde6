"""Drawing tokens: the right distribution, the same draws on CPU and in the kernel, nothing shared between rows."""

import numpy as np
import pytest
import torch
from compile_for_gpu import compiled
from distill_kernels.sampling import _gumbel, _philox, reference_noise, reference_sample, sample_tokens


def inputs(rows, columns, device, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(rows, columns, generator=generator)).to(device, dtype)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator).to(device)
    return logits, seeds, torch.randint(0, 2**20, (rows,), generator=generator).to(device)


def test_philox_gives_the_published_words():
    """Known answers of Philox-4x32-10 from the authors' Random123 distribution: zero counter and key; all ones."""
    zero = torch.zeros(1, dtype=torch.int64)
    assert [int(word) for word in _philox(zero, zero, zero)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.plain("0.0-1", "0.0-4097", "0.7-1", "0.7-4097", "1.0-3", "1.0-5000", "3.0-3", "3.0-5000")
@pytest.mark.parametrize("columns", [1, 3, 259, 4097, 5000])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 3.0])
def test_the_kernel_equals_its_reference(kernel_device, columns, temperature):
    logits, seeds, draws = inputs(5, columns, kernel_device)
    expected = reference_sample(logits, seeds, draws, temperature)
    assert torch.equal(sample_tokens(logits, seeds, draws, temperature), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_and_strides(kernel_device, dtype):
    logits, seeds, draws = inputs(4, 1000, kernel_device, dtype)
    wide = torch.full((4, 2, 1000), float("nan"), dtype=dtype, device=kernel_device)
    wide[:, 1] = logits
    for temperature in (0.0, 1.0):
        expected = reference_sample(logits, seeds, draws, temperature)
        assert torch.equal(sample_tokens(wide[:, 1], seeds, draws, temperature), expected)
        assert torch.equal(sample_tokens(logits.T.contiguous().T, seeds, draws, temperature), expected)


def test_the_first_of_equal_logits_is_the_greedy_one(kernel_device):
    logits = torch.zeros(3, 3000, device=kernel_device)
    logits[1, [2900, 1200, 700]] = 1
    seeds = torch.zeros(3, dtype=torch.int64, device=kernel_device)
    assert sample_tokens(logits, seeds, seeds, 0.0).tolist() == [0, 700, 0]


def test_impossible_tokens_are_never_sampled(kernel_device):
    logits = torch.full((64, 400), float("-inf"), device=kernel_device)
    logits[:, 77] = -30.0
    draws = torch.arange(64, device=kernel_device)
    assert sample_tokens(logits, draws, draws).tolist() == [77] * 64


@pytest.mark.plain("0.5")
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature):
    """Chi-square of 200,000 draws over 40 tokens: below the 99.99 % quantile of 39 degrees of freedom."""
    count, columns = 200_000, 40
    logits = torch.randn(columns, generator=torch.Generator().manual_seed(1)) * 1.5
    draws = torch.arange(count)
    tokens = sample_tokens(logits.expand(count, -1), torch.full((count,), 12345), draws, temperature)
    expected = torch.softmax(logits.double() / temperature, -1) * count
    chi = (((torch.bincount(tokens, minlength=columns) - expected) ** 2) / expected).sum()
    assert chi < 82.1, chi


def test_noise_is_gumbel_to_its_tails():
    """Kolmogorov-Smirnov distance of 400,000 values, and large values as often as they should be."""
    noise = reference_noise(torch.arange(100), torch.arange(100) + 7, 4000).flatten().double().sort().values
    cumulative = torch.exp(-torch.exp(-noise))
    distance = (cumulative - (torch.arange(len(noise)) + 0.5) / len(noise)).abs().max()
    assert distance < 2.2 / len(noise) ** 0.5
    assert torch.isfinite(noise[1:]).all()
    above = int((noise > 10).sum())
    expected = len(noise) * -np.expm1(-np.exp(-10.0))
    assert abs(above - expected) < 4 * expected**0.5


def test_extreme_random_words_give_the_largest_noise():
    """A rounded 1 - u would make +inf of the smallest words: a token chosen whatever its logit."""
    words = torch.tensor([0, 1, 2, 77, 2**10, 2**22 - 1, 2**22, 2**22 + 1, 2**27, 2**31, 2**32 - 2**10])
    exact = -torch.log(-torch.log1p(-(words.double() + 0.5) / 2**32))
    torch.testing.assert_close(_gumbel(words).double(), exact, rtol=2e-5, atol=2e-5)
    assert torch.isfinite(_gumbel(torch.tensor([0, 2**32 - 1]))).all()


def test_a_rows_token_depends_on_its_seed_and_draw_number_only():
    logits, seeds, draws = inputs(6, 500, "cpu")
    whole = sample_tokens(logits, seeds, draws)
    for row in range(6):
        alone = slice(row, row + 1)
        assert torch.equal(sample_tokens(logits[alone], seeds[alone], draws[alone]), whole[alone])
    flat = torch.zeros(1000, 50)
    first = sample_tokens(flat, torch.full((1000,), 3), torch.arange(1000))
    assert (first != sample_tokens(flat, torch.full((1000,), 4), torch.arange(1000))).float().mean() > 0.9
    assert (first != sample_tokens(flat, torch.full((1000,), 3), torch.arange(1000) + 1)).float().mean() > 0.9
    assert (first != sample_tokens(flat, torch.full((1000,), 3 + 2**32), torch.arange(1000))).float().mean() > 0.9


def test_the_op_passes_opcheck_and_compiles(kernel_device):
    logits, seeds, draws = inputs(2, 9, kernel_device)
    torch.library.opcheck(torch.ops.distill.sample_tokens.default, (logits, seeds, draws, 1.0))
    compiled = torch.compile(sample_tokens, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(logits, seeds, draws, 0.5), sample_tokens(logits, seeds, draws, 0.5))


def test_errors_name_the_invalid_argument():
    logits, seeds, draws = inputs(2, 9, "cpu")
    for arguments, name in (
        ((logits[0], seeds, draws), "logits"),
        ((logits.long(), seeds, draws), "logits"),
        ((logits, seeds.int(), draws), "seeds"),
        ((logits, seeds, draws[:1]), "draws"),
        ((logits, seeds, draws, -1.0), "temperature"),
        ((logits, seeds, draws, float("nan")), "temperature"),
    ):
        with pytest.raises(ValueError, match=f"^{name}"):
            sample_tokens(*arguments)


@pytest.mark.full
def test_the_step_of_decoding_compiles_for_sm_90():
    """Sampling, the cache's write and attention over it, with types and registers that the interpreter cannot see."""
    pytest.importorskip("triton")
    code = """
import torch
from distill_kernels.decoding.cached_attention import decode_attention
from distill_kernels.decoding.cache_write import write_newest
from distill_kernels.sampling import sample_tokens
z, n = torch.ones(4, 49152, dtype=torch.bfloat16), torch.ones(4, dtype=torch.int64)
sample_tokens(z, n, n, 0.0), sample_tokens(z, n, n, 0.7)
c, k = torch.ones(4, 128, 8, 64, dtype=torch.bfloat16), torch.ones(4, 8, 1, 64, dtype=torch.bfloat16)
write_newest(c, c.clone(), k, k, n)
for starts in (None, n):
    q = torch.ones(4, 32, 1, 64, dtype=torch.bfloat16)
    decode_attention(q, c.transpose(1, 2), c.transpose(1, 2), n, starts=starts)
d = torch.ones(1, 512, 1, 64, dtype=torch.bfloat16)  # in several chunks, which are put together
decode_attention(q[:1, :4], d.transpose(1, 2), d.transpose(1, 2), n[:1])
"""
    kernels = compiled("sm_90", code)
    names = [kernel.kernel for kernel in kernels]
    assert set(names) == {"_sample_kernel", "_put_kernel", "_chunk_kernel", "_combine_kernel"}, kernels
    assert names.count("_chunk_kernel") == 3 and names.count("_sample_kernel") == 2
    assert all(kernel.spilled == 0 for kernel in kernels), kernels


@pytest.mark.gpu
def test_a_real_vocabulary_on_the_gpu():
    logits, seeds, draws = inputs(64, 151_936, "cuda", torch.bfloat16)
    for temperature in (0.0, 1.0):
        ours = sample_tokens(logits, seeds, draws, temperature)
        reference = reference_sample(logits, seeds, draws, temperature)
        assert (ours == reference).float().mean() >= 0.98  # a tie in the last bit of a logarithm
