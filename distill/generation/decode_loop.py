"""Batched generation: prompts in one packed call, then a decoding step of fixed shapes, replayed as a CUDA graph.

    loop = DecodeLoop(model, EngineSettings(pad=0, ends=[2]))
    responses = loop.generate([[5, 6, 7], [8]], max_new_tokens=64, sampling=Sampling(1.0, top_p=0.9), seeds=[11, 12])
    responses.tokens[0], responses.truncated[0]

`generate` of transformers spends most of a token's time in Python: masks, logits processors, stopping criteria and a
cache that is copied. Here a step has fixed shapes and addresses (`RaggedCache`: every sequence starts at slot 0, so
there is neither padding nor a mask), sampling and bookkeeping happen on the device, and the host looks for finished
sequences only every few tokens. On a GPU a step is replayed as a CUDA graph; on a CPU it runs eagerly.

Batching is continuous: a finished sequence frees its sequence slot for a waiting prompt, and waiting prompts are
prefilled together once a part of the slots is free, so that long responses do not hold up a batch. A prefix shared by
prompts (the turns of a chat, several responses to a prompt, one system prompt) is computed once, and its keys and
values are copied to each.

The last token of a prompt is fed by the first step, so that logits are computed for one position per sequence only, by
the model's own forward with its own scaling and soft cap.
"""

from __future__ import annotations

import abc
import contextlib
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from distill_kernels.launch import LAUNCH_ERRORS, next_power_of_2
from torch import nn

from distill.core.eval_mode import eval_mode
from distill.generation.fused_step import FusedStepFactory
from distill.generation.ragged_cache import attention_for_ragged_cache, prefill_sequences
from distill.generation.sampling import GREEDY, Sampling
from distill.generation.sequence_slots import Progress, SequenceSlots, copy_to_host
from distill.generation.shared_prefixes import order_by_prefix
from distill.generation.stopping import StopStrings
from distill.models.graphs import own_workspace
from distill.models.head import decoder_of, unwrap_peft
from distill.models.layers import is_offloaded
from distill.models.patch.document_rope import rope_by_document, short_length

log = logging.getLogger(__name__)

CHECK_EVERY = 16  # tokens between two checks for finished sequences; each check waits for the GPU
STEPS_PER_REPLAY = 4  # tokens of one replay
CACHE_MULTIPLE = 128
MIN_FREE_FRACTION = 0.25  # of the sequence slots must be free before a prefill, which holds up all others
MAX_BUFFERS = 2  # captured steps, each with its cache


@dataclass
class Generated:
    """Responses, in the order of their prompts.

    Attributes:
        tokens: tokens of each response, with its end-of-sequence token and without the prompt.
        truncated: whether a response was cut off by its limit rather than ended by the model or a stop string.
        log_probs: log-probabilities of each response's tokens under the model that generated it, at temperature 1 and
            without cut-offs, natural logarithms; empty without `EngineSettings.log_probs`.
    """

    tokens: list[list[int]]
    truncated: list[bool]
    log_probs: list[list[float]] = field(default_factory=list)


class EngineSettings(NamedTuple):
    """Settings of a generation engine.

    Attributes:
        pad: any token; fills positions that are never read.
        ends: tokens that end a response.
        autocast: compute dtype of the model where that is not its weights'.
        vocab_size: only this many first tokens of the vocabulary are generated; None for all of the head.
        max_length: minimum length, prompt and response together, that buffers are allocated for: on a GPU fixed sizes
            are captured once.
        log_probs: return the tokens' log-probabilities too.
        fused: run a step by few fused kernels, for models of a supported form; None on GPUs where they were measured to
            be faster.
        stop: strings that end a response with the token that completes one; None for no stop strings.
    """

    pad: int
    ends: Sequence[int]
    autocast: torch.dtype | None = None
    vocab_size: int | None = None
    max_length: int = 1
    log_probs: bool = False
    fused: bool | None = None
    stop: StopStrings | None = None


class Request(NamedTuple):
    """Prompts for an engine, with a limit and a seed each; see `DecodeEngine.generate`.

    `same_weights`: the model's weights are those of the last request.
    """

    prompts: Sequence[Sequence[int]]
    limits: list[int]
    seeds: list[int]
    sampling: Sampling
    batch_size: int
    same_weights: bool = False

    def of(self, numbers: Sequence[int]) -> Request:
        """Return the request with these prompts alone, in this order."""
        return self._replace(
            prompts=[self.prompts[n] for n in numbers],
            limits=[self.limits[n] for n in numbers],
            seeds=[self.seeds[n] for n in numbers],
        )


class DecodeEngine(abc.ABC):
    """Generator of responses to prompts of token ids."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int],
        sampling: Sampling = GREEDY,
        seeds: Sequence[int] | None = None,
        batch_size: int = 64,
        same_weights: bool = False,
    ) -> Generated:
        """Generate a response to every prompt.

        Args:
            prompts: Token ids, at least one each.
            max_new_tokens: Maximum length of a response, for all or for each.
            sampling: Sampling parameters.
            seeds: 64-bit integers, one per prompt: the sampled tokens depend on a prompt's own seed, not on its
                neighbours (up to the rounding of a batched matrix product). None for the prompts' indices.
            batch_size: Maximum number of sequences at once.
            same_weights: The weights have not changed since the last call: an engine that copies them need not do so.

        Raises:
            ValueError: an empty prompt, or arguments of different lengths.
        """
        count = len(prompts)
        limits = [max_new_tokens] * count if isinstance(max_new_tokens, int) else list(max_new_tokens)
        own_seeds = list(range(count)) if seeds is None else list(seeds)
        if not len(limits) == len(own_seeds) == count:
            raise ValueError(f"max_new_tokens, seeds: expected {count} each, got {len(limits)} and {len(own_seeds)}")
        if not all(map(len, prompts)):
            raise ValueError("prompts: expected at least one token in each, got an empty prompt")
        return self.run(Request(prompts, limits, own_seeds, sampling, batch_size, same_weights))

    @abc.abstractmethod
    def run(self, request: Request) -> Generated:
        """Generate the responses to a request whose lists are equally long."""


class DecodeLoop(DecodeEngine):
    """Generation engine of one model; buffers and the captured step are kept for the next call.

    The model's weights may change between calls, as they do in training; the model is in eval mode during a call.

    Args:
        model: A causal language model of transformers, bare or inside PEFT, not sharded; see `unsupported_reason`.
    """

    def __init__(self, model: nn.Module, settings: EngineSettings) -> None:
        self.model = model
        self.settings = settings
        self.pad = settings.pad
        self.inner: Any = unwrap_peft(model)
        self.decoder = decoder_of(model)
        self.device = next(model.parameters()).device
        self.ends = torch.tensor(sorted(set(settings.ends)), dtype=torch.int64, device=self.device)
        # a graph would go on copying the layers that were streamed when it was captured
        self.replays = self.device.type == "cuda" and not is_offloaded(self.inner)
        self.buffers: list[SequenceSlots] = []  # most recently used last
        self.fused_step_factory = FusedStepFactory(model, settings.autocast, settings.vocab_size, settings.fused)
        self.stream = torch.cuda.Stream(self.device) if self.replays else None
        rope_by_document(model)
        self.short_length = short_length(self.inner)  # where LongRoPE takes other frequencies for longer sequences

    def run(self, request: Request) -> Generated:
        prompts = request.prompts
        limits = request.limits
        result = Generated([[] for _ in prompts], [limit == 0 for limit in limits], [[] for _ in prompts])
        # prompts that share a prefix are prefilled together; else neighbours of similar length waste least
        wanted = [number for number, limit in enumerate(limits) if limit > 0]
        order = [wanted[place] for place in order_by_prefix([prompts[number] for number in wanted])]
        if not order:
            return result
        chosen = request.of(order)
        here = torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
        with here, self._decoding_mode():
            responses = self._generate_batches(chosen, self._slots_for(chosen))
        for place, number in enumerate(order):
            result.tokens[number] = responses.tokens[place]
            result.truncated[number] = responses.truncated[place]
            result.log_probs[number] = responses.log_probs[place]
        return result

    def _generate_batches(self, request: Request, slots: SequenceSlots) -> Generated:
        """Generate by continuous batching: finished sequences free their sequence slots for waiting prompts.

        A sequence of LongRoPE that outgrows the short set stops there, and waits as a prompt of its tokens so far:
        all of its cached keys have to be computed again.
        """
        prompts, _, _, sampling, *_ = request
        responses = Generated([[] for _ in prompts], [True] * len(prompts), [[] for _ in prompts])
        waiting = deque(range(len(prompts)))
        active = dict[int, int]()
        steps_per_replay = 1 if slots.graph is None else STEPS_PER_REPLAY
        check_every = CHECK_EVERY if self.device.type == "cuda" else 1
        slots.clear(self.pad)
        # tokens of each sequence; a check whose tokens are not read yet
        made = [0] * slots.batch
        unread: Progress | None = None
        while waiting or active:
            free = [slot for slot in range(slots.batch) if slot not in active]
            if waiting and (not active or len(free) >= slots.batch * MIN_FREE_FRACTION):
                assigned = {slot: waiting.popleft() for slot in free[: len(waiting)]}
                self._prefill(request, responses, assigned, slots)
                active |= assigned
                for slot, number in assigned.items():
                    made[slot] = len(responses.tokens[number])
            left = max(self._next_stop(request, responses, number) - made[slot] for slot, number in active.items())
            # until the next check, or the limit of the longest response, in whole replays: a sequence that is done
            # writes padding meanwhile
            steps = -(-min(check_every, left) // steps_per_replay) * steps_per_replay
            for _ in range(0, steps, steps_per_replay):
                if slots.graph is not None:
                    slots.graph.replay()
                else:
                    self._step(slots, sampling)
            if unread is not None:  # while these steps run on the device
                waiting += self._read(unread, request, responses, active)
            # The copy waits for these steps. Its tokens are read at once only where a sequence has ended, since its
            # slot is free then; else while the next steps run.
            unread = copy_to_host(slots, steps)
            slots.column.zero_()  # the next steps fill the response buffers from their first column again
            made = unread.generated.tolist()
            done = unread.done.tolist()
            if self.settings.stop is not None or any(done[slot] for slot in active):
                waiting += self._read(unread, request, responses, active)
                unread = None
        return responses

    def _next_stop(self, request: Request, responses: Generated, number: int) -> int:
        """Return the length of a response at which its sequence leaves its slot, at the latest."""
        prompt = len(request.prompts[number])
        limit = request.limits[number]
        if self.short_length is None or prompt + len(responses.tokens[number]) > self.short_length:
            return limit
        return min(limit, self.short_length + 1 - prompt)

    def _read(self, check: Progress, request: Request, responses: Generated, active: dict[int, int]) -> list[int]:
        """Append the tokens sampled since the previous check, and free the slots of finished sequences.

        Returns the sequences that have to go on in another slot.
        """
        made = check.generated.tolist()
        done = check.done.tolist()
        ended = check.ended.tolist()
        tokens = check.responses.tolist()
        log_probs = check.log_probs.tolist()
        stop = self.settings.stop
        going_on = list[int]()
        for slot, number in list(active.items()):
            own = responses.tokens[number]
            seen = len(own)
            own += tokens[slot][: made[slot] - seen]
            end = stop.find_end(own, seen) if stop is not None else None
            if end is not None:
                del own[end:]  # tokens sampled beyond it
            if self.settings.log_probs:
                responses.log_probs[number] += log_probs[slot][: len(own) - seen]
            if done[slot] or end is not None:
                responses.truncated[number] = not ended[slot] and end is None
                del active[slot]
                if responses.truncated[number] and len(own) < request.limits[number]:
                    going_on.append(number)
        return going_on

    def _prefill(self, request: Request, responses: Generated, assigned: dict[int, int], slots: SequenceSlots) -> None:
        """Prefill sequences into free slots: `assigned` maps a slot to the index of its prompt."""
        sequences = {slot: [*request.prompts[number], *responses.tokens[number]] for slot, number in assigned.items()}
        prefill_sequences(self.decoder, sequences, slots.cache, slots.cached_prompts, self.short_length)
        numbers = list(assigned.values())
        slots.assign(
            list(assigned),
            list(sequences.values()),
            [self._next_stop(request, responses, number) for number in numbers],
            [request.seeds[number] for number in numbers],
            [len(responses.tokens[number]) for number in numbers],
        )

    def _slots_for(self, request: Request) -> SequenceSlots:
        """Return buffers for one batch; where they are kept, their sizes are rounded up and a step is captured.

        Their sizes follow from this call alone, never from earlier ones, since a sum's rounding depends on its shape: a
        resumed run must generate the same tokens as an uninterrupted one.
        """
        prompts, limits, _, sampling, batch_size, _ = request
        batch = min(len(prompts), batch_size)
        cache_length = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
        if not self.replays:
            once = SequenceSlots(self.inner.config, batch, cache_length, CHECK_EVERY, self.device)
            once.fused = self.fused_step_factory.step_for(once, self.ends, self.pad)
            return once
        batch = min(next_power_of_2(batch), batch_size)
        cache_length = -(-max(self.settings.max_length, cache_length) // CACHE_MULTIPLE) * CACHE_MULTIPLE
        slots = next((slots for slots in self.buffers if slots.sizes == (batch, cache_length)), None)
        if slots is None:
            # older buffers go before new ones are allocated, so that memory never holds one more than the maximum
            del self.buffers[: 1 - MAX_BUFFERS]
            slots = SequenceSlots(self.inner.config, batch, cache_length, CHECK_EVERY, self.device)
        else:
            self.buffers.remove(slots)
        self.buffers.append(slots)
        self._capture(slots, sampling)
        return slots

    def _step(self, slots: SequenceSlots, sampling: Sampling) -> None:
        """Decode one token of every sequence. Reads and writes the buffers of `slots` only, and never synchronises."""
        if slots.fused is not None:
            slots.fused(sampling)
            return
        cache = slots.cache
        # the class's forward, without wrappers that a trainer put around the instance's (the loss, a context manager)
        output = type(self.inner).forward(
            self.inner,
            input_ids=slots.token[:, None],
            position_ids=cache.lengths[:, None] - 1,
            past_key_values=cache,
            use_cache=True,
            ragged_cache=cache,
        )
        logits = output.logits[:, -1, : self.settings.vocab_size]
        slots.sample(logits, sampling, self.ends, self.pad, log_probs=self.settings.log_probs)

    @contextlib.contextmanager
    def _decoding_mode(self) -> Iterator[None]:
        """Enter eval mode, no gradients, the ragged cache's attention and autocast; all are restored afterwards."""
        # weights cached by autocast would be stale in a graph that is replayed after they changed
        autocast = torch.autocast(
            self.device.type,
            self.settings.autocast,
            enabled=self.settings.autocast is not None,
            cache_enabled=not self.replays,
        )
        with eval_mode(self.model), torch.no_grad(), autocast, attention_for_ragged_cache(self.model):
            yield

    def _capture(self, slots: SequenceSlots, sampling: Sampling) -> None:
        """Capture several steps, once for these buffers, sampling parameters, addresses of weights and patches."""
        weights = tuple(parameter.data_ptr() for parameter in self.model.parameters())
        patches = tuple(id(module.__dict__.get("forward")) for module in self.model.modules())
        depends_on = (sampling, weights, patches)
        if slots.captured_key == depends_on:
            return
        slots.graph = None
        slots.fused = self.fused_step_factory.step_for(slots, self.ends, self.pad)
        slots.clear(self.pad)  # all sequences are done: the steps below write one cache slot and advance nothing
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        # The warm-up compiles and tunes kernels, which no capture allows. The streams wait for each other: the warm-up
        # for the last update of the weights, the present stream for the buffers.
        with torch.cuda.stream(self.stream):
            self._warm_up(slots, sampling)
            waits = _host_synchronisation(lambda: self._step(slots, sampling))
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        if waits is not None:
            self.replays = False
            log.warning("decoding runs without a CUDA graph, several times slower: the model's forward %s", waits)
            return
        slots.column.zero_()
        graph = torch.cuda.CUDAGraph()
        # other threads (NCCL's, a data loader's) may call CUDA during the capture
        with own_workspace(), torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            for _ in range(STEPS_PER_REPLAY):
                self._step(slots, sampling)
        slots.graph = graph
        slots.captured_key = depends_on

    def _warm_up(self, slots: SequenceSlots, sampling: Sampling) -> None:
        """Run two steps with all sequences done; fall back to the model's layers if fused kernels do not compile."""
        try:
            for _ in range(2):
                slots.column.zero_()
                self._step(slots, sampling)
        except LAUNCH_ERRORS as error:
            if slots.fused is None:
                raise
            self.fused_step_factory.disable(error)
            slots.fused = None
            self._warm_up(slots, sampling)
        slots.column.zero_()


def _host_synchronisation(step: Any) -> str | None:
    """Run `step`; return PyTorch's error where an operation in it synchronises, which no graph can hold, else None."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return None
