"""A decoding step by few fused kernels: embedding, five per layer, the head with sampling, the bookkeeping."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from distill_kernels.decoding.fused_linear import MAX_ROWS
from distill_kernels.decoding.plan import DecodePlan
from distill_kernels.decoding.tokens import Draw, SequenceState, TileScores, finish_tokens, score_tokens
from distill_kernels.launch import LAUNCH_ERRORS
from torch import nn
from torch.nn import functional as F

from distill.core.errors import first_line
from distill.generation.fused_decoder import FusedDecoder, epsilon
from distill.generation.ragged_cache import AttentionCall
from distill.generation.sampling import Sampling
from distill.generation.sequence_slots import SequenceSlots
from distill.generation.support_check import FusedSupport, fused_support
from distill.models.head import decoder_of, find_head

log = logging.getLogger(__name__)


class FusedStepFactory:
    """Factory of a model's fused steps; the model is tried again when its modules have changed.

    Args:
        autocast: compute dtype of the model where that is not its weights'.
        columns: only this many first tokens of the vocabulary are sampled; None for all of the head.
        fused: True uses them on families of GPUs too that they were never measured on, False nowhere.
    """

    def __init__(self, model: nn.Module, autocast: torch.dtype | None, columns: int | None, fused: bool | None) -> None:
        self.model = model
        self.autocast = autocast
        self.columns = columns
        self.fused = fused
        self._result: tuple[object, FusedSupport] | None = None

    def step_for(self, slots: SequenceSlots, ends: torch.Tensor, pad: int) -> FusedStep | None:
        """Return a fused step on these buffers; None where the model's own forward is needed, with a debug line.

        Call it inside the decode loop's attention, mode and autocast.
        """
        if self.fused is False:
            return None
        weight = next(self.model.parameters())
        dtype = self.autocast or weight.dtype
        modules = tuple(
            (id(module), id(module.__dict__.get("forward")), len(module._forward_hooks), len(module._forward_pre_hooks))
            for module in self.model.modules()
        )
        key = (modules, weight.dtype, weight.device, slots.batch > MAX_ROWS)
        if self._result is None or self._result[0] != key:
            try:
                support = fused_support(self.model, self.autocast, slots.batch, forced=self.fused is True)
            except LAUNCH_ERRORS as error:
                self.disable(error)
                return None
            self._result = key, support
            if support.reason is not None:
                log.debug("decoding by the model's own layers, without fused ones: %s", support.reason)
        reason, calls = self._result[1]
        if reason is not None:
            return None
        return FusedStep(self.model, slots, dtype, calls, (ends, pad, self.columns))

    def disable(self, error: Exception) -> None:
        """Use no fused steps from now on, since one of their kernels does not compile or launch on this machine."""
        self.fused = False
        log.warning(
            "decoding by the model's own layers, which is slower: a fused kernel fails here (%s)", first_line(error)
        )


class FusedStep:
    """A step on the buffers of `slots`; parameters are read in place when it is called or captured."""

    def __init__(
        self,
        model: nn.Module,
        slots: SequenceSlots,
        dtype: torch.dtype,
        calls: Mapping[nn.Module, AttentionCall],
        drawing: tuple[torch.Tensor, int, int | None],
        plan: DecodePlan | None = None,
    ) -> None:
        ends, pad, columns = drawing
        self.decoder = FusedDecoder(model, slots.cache, dtype, calls, plan)
        self.head = find_head(model).linear
        self.norm = decoder_of(model).get_submodule("norm")
        self.dtype = dtype
        self.slots = slots
        self.seeds = slots.seeds
        self.generated = slots.generated
        self.state = SequenceState(
            slots.token,
            slots.generated,
            slots.limits,
            slots.done,
            slots.ended,
            slots.cache.lengths,
            slots.responses,
            slots.log_probs,
            slots.column,
            ends,
            pad,
        )
        weight = self.head.get_parameter("weight")
        self.columns = min(len(weight), columns or len(weight))
        self.scores = TileScores.allocate(slots.batch, self.columns, self.decoder.plan.head, weight.device)

    def __call__(self, sampling: Sampling) -> None:
        decoder = self.decoder
        norm = self.norm
        decoder.embed(self.state)
        decoder.layers()
        weight = self.head.get_parameter("weight")
        if sampling.has_cut_offs:  # cut-offs need all of a row's logits
            logits = F.linear(norm(decoder.stream.x).to(self.dtype), weight[: self.columns].to(self.dtype))
            self.slots.column -= 1  # the first kernel has incremented it
            self.slots.sample(logits, sampling, self.state.ends, self.state.pad, log_probs=True)
            return
        draw = Draw(self.seeds, self.generated, sampling.temperature, self.columns)
        score_tokens(decoder.stream, epsilon(norm), weight, draw, self.scores, decoder.plan.head)
        finish_tokens(self.scores, self.state)
