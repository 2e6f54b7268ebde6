"""A patched model's attention: padding without a mask and without a look at it, and `generate` on our cache."""

import copy

import pytest
import torch
from helpers import no_syncs, ops_called
from test_adoption import assert_same_step, batch, loss_and_gradients
from test_patching import assert_same, make

import distill
from distill.models.patch import padding
from distill.models.patch.patching import patch

MASKS = {
    "right": [[1] * 9 + [0] * 5, [1] * 14, [1] * 3 + [0] * 11],
    "left": [[0] * 5 + [1] * 9, [1] * 14, [0] * 11 + [1] * 3],
    "both": [[0] * 2 + [1] * 9 + [0] * 3, [1] * 14, [0] * 14],
    "ones": [[1] * 14] * 3,
    "gap": [[1] * 5 + [0] * 2 + [1] * 7, [1] * 14, [1] * 3 + [0] * 11],
    "none": None,
}


@pytest.mark.plain("llama-left", "llama-gap", "qwen3-left", "gpt2-ones")
@pytest.mark.parametrize("form", MASKS)
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3", "gemma3_text", "gpt2"])
def test_padding_takes_our_attention_with_the_same_numbers(kind, form, caplog):
    model = make(kind)
    original = copy.deepcopy(model)
    distill.patch(model)
    mask = None if MASKS[form] is None else torch.tensor(MASKS[form])
    ids = batch(3, 14)["input_ids"]
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    with ops_called("distill::flash_attention") as ours:
        assert_same_step(model, original, input_ids=ids, attention_mask=mask, labels=labels)
    layers = model.config.num_hidden_layers
    assert len(ours) == (0 if form == "gap" else layers)
    assert ("zeros between a row's ones" in caplog.text) == (form == "gap")


@pytest.mark.full
def test_padding_on_the_kernels_themselves(kernel_device):
    """On the left of one row and on the right of another."""
    model = make("mistral", hidden=64).to(kernel_device)
    mask = torch.tensor(MASKS["both"], device=kernel_device)
    ids = batch(3, 14)["input_ids"].to(kernel_device)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    expected, wanted = loss_and_gradients(model, **inputs)
    assert patch(model).attention == "triton"  # a kernel that computes something else is not taken
    loss, gradients = loss_and_gradients(model, **inputs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    for name, gradient in gradients.items():
        assert_same(gradient, wanted[name], 1e-3)


def test_unsupported_masks_are_logged(caplog):
    model = make("llama")
    original = copy.deepcopy(model)
    distill.patch(model)
    ids = batch()["input_ids"]
    pairs = torch.ones(2, 1, 13, 13, dtype=torch.bool).tril()
    pairs[:, :, 6:, 2] = False
    assert_same(model(input_ids=ids, attention_mask=pairs).logits, original(input_ids=ids, attention_mask=pairs).logits)
    ones = torch.ones_like(ids)
    caplog.clear()
    model.config.attention_dropout = 0.5
    model.train()(input_ids=ids, attention_mask=ones, use_cache=False)
    assert "it drops probabilities out" in caplog.text


def test_documents_of_a_mask():
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]])
    queries, keys, poison = padding.PaddingMasks().documents(mask, mask)
    assert poison is None and len(queries) == len(keys) == 2 * mask.numel() + 1
    # a document each: of the zeros' queries and of their keys, of the ones
    assert queries[:7].tolist() == [0, 1, 1, 3, 4, 4, 8] and keys[:7].tolist() == [0, 0, 1, 3, 3, 4, 8]
    assert set(queries[7:].tolist()) == set(keys[7:].tolist()) == {8}


def test_a_copy_attends_by_itself():
    model = make("llama")
    distill.patch(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.model.embed_tokens.weight.mul_(2)
    expected = make("llama")
    with torch.no_grad():
        expected.model.embed_tokens.weight.mul_(2)
    assert_same_step(copied, expected, **batch(), attention_mask=torch.ones(2, 13, dtype=torch.long))
    gap = torch.tensor([[1] * 5 + [0] * 2 + [1] * 6] * 2)
    assert_same_step(copied, expected, **batch(), attention_mask=gap)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["right", "left", "ones", "gap"])
def test_on_a_gpu_masks_are_not_waited_for(form):
    model = make("llama", hidden=64).cuda()
    mask = torch.tensor(MASKS[form], device="cuda")
    ids = batch(3, 14)["input_ids"].cuda()
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    expected, _ = loss_and_gradients(model, **inputs)
    distill.patch(model, keep_logits=True)
    inputs["use_cache"] = False  # a call that is to fill a cache keeps PyTorch's attention
    model(**inputs)
    torch.cuda.synchronize()
    if form == "gap":
        with pytest.raises(ValueError, match="attention_mask: expected padding"):
            model(**inputs)
        assert model(**inputs).loss.isnan()
        return
    with no_syncs():
        hidden = model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    assert hidden.isfinite().all()
    assert model(**inputs).loss.item() == pytest.approx(expected.item(), rel=1e-3)


def test_masks_with_gaps_give_nan_and_raise_later(hardware):
    """A GPU's way, walked through on a CPU: only the device's type is another one."""

    class Elsewhere(torch.Tensor):
        device = torch.device("cuda", 0)

    class Event:
        query = staticmethod(lambda: True)

    masks = padding.PaddingMasks()
    hardware.setattr(masks, "_remember", lambda poison: setattr(masks, "_last", (poison, Event())))
    hardware.setattr(padding, "cumulative_lengths", lambda ones, starts: (ones, starts))
    for form, bad in (("right", False), ("left", False), ("gap", True)):
        mask = torch.tensor(MASKS[form]).as_subclass(Elsewhere)
        *_, poison = masks.documents(mask, mask)
        assert bool(poison.isnan()) == bad
        output = padding.add_to_hidden((torch.ones(3, 14, 2), None), poison)
        assert bool(output[0].isnan().all()) == bad
    with pytest.raises(ValueError, match="attention_mask: expected padding"):
        masks.documents(mask, mask)
