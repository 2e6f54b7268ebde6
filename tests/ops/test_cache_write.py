"""The newest key and value of each sequence, written into its own slot."""

import pytest
import torch
from distill_kernels.decoding.cache_write import write_newest


@pytest.mark.parametrize("size", [16, 20])
def test_write_newest_writes_each_sequences_own_slot(kernel_device, size):
    batch, heads, slots = 3, 2, 9
    keys, values = torch.zeros(2, batch, slots, heads, size, device=kernel_device)
    k, v = torch.randn(2, batch, heads, 1, size, device=kernel_device)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)  # as a projection gives it
    write_newest(keys, values, k, v, torch.tensor([1, 9, 4], device=kernel_device))
    for cached, new in ((keys, k), (values, v)):
        for sequence, slot in enumerate((0, 8, 3)):
            assert torch.equal(cached[sequence, slot], new[sequence, :, 0])
        assert int((cached != 0).sum()) == batch * heads * size
    with pytest.raises(ValueError, match="lengths"):
        write_newest(keys, values, k, v, torch.tensor([1, 2], device=kernel_device))
