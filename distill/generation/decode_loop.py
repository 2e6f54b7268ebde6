"""Batched generation as a lean loop: prompts in one padded call, then one fixed step a token, replayed on a GPU.

    loop = DecodeLoop(model, EngineSettings(pad=0, ends=[2]))
    answers = loop.generate([[5, 6, 7], [8]], max_new_tokens=64, temperature=1.0, seeds=[11, 12])
    answers.tokens[0], answers.truncated[0]

`generate` of transformers spends most of a token's time in Python: masks, logits processors, stopping criteria and a
cache that is copied. Here a step has fixed shapes and addresses (`RaggedCache`: every sequence starts at slot 0, so
there is neither padding nor a mask), sampling and book-keeping happen on the device, and the host looks for finished
sequences every few tokens only. On a GPU the whole step is one CUDA graph; on a CPU the same step runs as it is.

The last token of a prompt is fed by the first step, so that logits are only ever made for one position a sequence, by
the model's own forward with all that it does to them.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from distill_kernels.launch import next_power_of_2
from distill_kernels.sampling import sample_tokens
from torch import nn

from distill.core.eval_mode import eval_mode
from distill.generation.fused_step import FusedSteps
from distill.generation.seats import Seats, fetched, sent
from distill.models.attention import soft_cap_kept
from distill.models.graphs import WORKSPACES, own_workspace
from distill.models.head import bare, decoder_of
from distill.models.offload import is_offloaded
from distill.models.ragged_cache import RaggedCache, attention_for_ragged_cache

log = logging.getLogger(__name__)

LOOK_EVERY = 16  # tokens between two looks at who has finished; each look waits for the GPU
STEPS = 4  # tokens of one replay: between two the host is needed, which may be busy with a training step
SLOTS_STEP = 128
MOST_BUFFERS = 2  # captured steps, each with its cache


@dataclass
class Generated:
    """Answers, in the order of their prompts.

    Attributes:
        tokens: of each answer, its end-of-sequence token included, the prompt not.
        truncated: whether an answer was cut off by its limit rather than ended by the model.
        log_probs: of each answer's tokens under the model that gave it, at temperature 1, natural logarithms; empty
            where `EngineSettings.log_probs` did not ask for them.
    """

    tokens: list[list[int]]
    truncated: list[bool]
    log_probs: list[list[float]] = field(default_factory=list)


class EngineSettings(NamedTuple):
    """What an engine is made for.

    Attributes:
        pad: any token; fills what is never looked at.
        ends: tokens that end an answer.
        autocast: dtype that the model computes in where that is not its weights'.
        vocab_size: only the first so many tokens are generated; None for all of the head.
        max_length, max_new_tokens: prompt and answer together, and new tokens, that buffers are made for at least:
            on a GPU fixed sizes are captured once.
        log_probs: give the tokens' log-probabilities too.
        fused: a step by few kernels, for models of their form; None where they were measured to be faster: nowhere yet.
    """

    pad: int
    ends: Sequence[int]
    autocast: torch.dtype | None = None
    vocab_size: int | None = None
    max_length: int = 1
    max_new_tokens: int = 1
    log_probs: bool = False
    fused: bool | None = None


class Request(NamedTuple):
    """Prompts for an engine, with a limit and a seed each; see `Engine.generate`."""

    prompts: Sequence[Sequence[int]]
    limits: list[int]
    seeds: list[int]
    temperature: float
    batch_size: int


class Engine(abc.ABC):
    """Answers prompts of token ids.

    Attributes:
        overlaps: Whether what `begin` returned last may be called in another thread, while this one goes on.
    """

    overlaps = False

    def generate(self, prompts: Sequence[Sequence[int]], **more: Any) -> Generated:
        """Answer every prompt; as `begin`, at once."""
        return self.begin(prompts, **more)()

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int],
        temperature: float = 0.0,
        seeds: Sequence[int] | None = None,
        batch_size: int = 64,
    ) -> Callable[[], Generated]:
        """Get ready to answer every prompt, by the weights as they are now; the answers come of the call of the result.

        Args:
            prompts: Token ids, at least one each.
            max_new_tokens: The most an answer may have, for all or for each.
            temperature: 0 for the likeliest token; else tokens are drawn from softmax(logits / temperature).
            seeds: 64-bit integers, one a prompt: what is drawn follows from a prompt's own seed, not from its
                neighbours (up to the rounding of a batched matrix product). None for the prompts' numbers.
            batch_size: Sequences at once, at most.

        Raises:
            ValueError: an empty prompt, or arguments of different lengths.
        """
        count = len(prompts)
        limits = [max_new_tokens] * count if isinstance(max_new_tokens, int) else list(max_new_tokens)
        own_seeds = list(range(count)) if seeds is None else list(seeds)
        if not len(limits) == len(own_seeds) == count:
            raise ValueError(f"prompts: {count} with {len(limits)} max_new_tokens and {len(own_seeds)} seeds")
        if not all(map(len, prompts)):
            raise ValueError("prompts: an empty prompt has nothing to continue")
        return self.prepare(Request(prompts, limits, own_seeds, temperature, batch_size))

    def prepare(self, request: Request) -> Callable[[], Generated]:
        """What `begin` returns for a request whose lists are equally long."""
        return functools.partial(self.answer, request)

    @abc.abstractmethod
    def answer(self, request: Request) -> Generated:
        """Answer a request whose lists are equally long."""


class DecodeLoop(Engine):
    """Generates with one model; buffers and the captured step are kept for the next call.

    The model's weights may change between calls, as they do in training; its mode is put to eval and given back.

    Args:
        model: A causal language model of transformers, bare or inside PEFT, not sharded; see `why_not`.
    """

    def __init__(self, model: nn.Module, settings: EngineSettings) -> None:
        self.model, self.settings, self.pad = model, settings, settings.pad
        self.inner: Any = bare(model)
        self.decoder = decoder_of(model)
        self.device = next(model.parameters()).device
        self.ends = torch.tensor(sorted(set(settings.ends)), dtype=torch.int64, device=self.device)
        # a graph would go on copying the layers that travelled when it was captured
        self.replays = self.device.type == "cuda" and not is_offloaded(self.inner)
        self.buffers: list[Seats] = []  # the latest last
        self.fused_steps = FusedSteps(model, settings.autocast, settings.vocab_size, settings.fused)
        # its kernels are small, and would wait for those of a training step that runs at the same time
        self.stream = torch.cuda.Stream(self.device, priority=-1) if self.replays else None

    @property
    def overlaps(self) -> bool:  # type: ignore[override]
        """A step that is launched kernel by kernel would only be in the way of who launches others."""
        return self.replays or self.device.type == "cpu"

    def answer(self, request: Request) -> Generated:
        return self.prepare(request)()

    def prepare(self, request: Request) -> Callable[[], Generated]:
        """Buffers, and steps captured; what is returned replays them on a stream of its own."""
        prompts, limits, seeds, temperature, batch_size = request
        # neighbours of like length waste least
        order = sorted((number for number, limit in enumerate(limits) if limit > 0), key=lambda n: len(prompts[n]))
        batches: list[tuple[list[int], Request, Seats]] = []
        with self._ready():
            for start in range(0, len(order), batch_size):
                chosen = order[start : start + batch_size]
                batch = Request(
                    [prompts[n] for n in chosen], [limits[n] for n in chosen], [seeds[n] for n in chosen], temperature,
                    batch_size,
                )  # fmt: skip
                batches.append((chosen, batch, self._seats_for(batch)))
        now = None if self.stream is None else torch.cuda.current_stream(self.device).record_event()

        def answer_all() -> Generated:
            result = Generated([[] for _ in prompts], [limit == 0 for limit in limits], [[] for _ in prompts])
            with self._on_own_stream(now), self._ready():
                for chosen, batch, seats in batches:
                    for number, (tokens, truncated, log_probs) in zip(
                        chosen, self._answer_batch(batch, seats), strict=True
                    ):
                        result.tokens[number], result.truncated[number] = tokens, truncated
                        result.log_probs[number] = log_probs
            return result

        return answer_all

    def _answer_batch(self, request: Request, seats: Seats) -> Iterator[tuple[list[int], bool, list[float]]]:
        prompts, limits, seeds, temperature, _ = request
        self._read_prompts(prompts, seats)
        seats.seat(prompts, limits, seeds, self.pad)
        look_every = LOOK_EVERY if self.device.type == "cuda" else 1
        at_once, most = 1 if seats.graph is None else STEPS, max(limits)
        for made in range(at_once, most + at_once, at_once):
            if seats.graph is not None:
                seats.graph.replay()
            else:
                self._step(seats, temperature)
            if made % look_every == 0 and made < most and bool(fetched(seats.done)[0].all()):
                break
        results = fetched(seats.answers, seats.made, seats.ended, seats.log_probs)
        answers, lengths, ended, log_probs = (tensor.tolist() for tensor in results)
        if not self.settings.log_probs:
            log_probs = [[]] * len(prompts)
        return ((answers[n][: lengths[n]], not ended[n], log_probs[n][: lengths[n]]) for n in range(len(prompts)))

    @contextlib.contextmanager
    def _on_own_stream(self, after: torch.cuda.Event | None) -> Iterator[None]:
        """On a GPU: inside, kernels go to the loop's stream, after what the event stands for."""
        if self.stream is None or after is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            self.stream.wait_event(after)
            yield

    def _seats_for(self, request: Request) -> Seats:
        """Buffers for one batch, of sizes that are rounded up where they are kept; there with a captured step.

        Their sizes follow from this call alone, never from earlier ones, since a sum's rounding depends on its shape:
        a resumed run must generate what the undisturbed one did.
        """
        prompts, limits, _, temperature, batch_size = request
        batch, most = len(prompts), max(limits)
        slots = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
        if not self.replays:
            once = Seats(self.inner.config, batch, slots, most, self.device)
            once.fused = self.fused_steps.step_for(once, self.ends, self.pad)
            return once
        batch, most = min(next_power_of_2(batch), batch_size), max(self.settings.max_new_tokens, next_power_of_2(most))
        most = max(most, STEPS)
        slots = -(-max(self.settings.max_length, slots) // SLOTS_STEP) * SLOTS_STEP
        seats = next((seats for seats in self.buffers if seats.sizes == (batch, slots, most)), None)
        if seats is None:
            del self.buffers[: 1 - MOST_BUFFERS]
            seats = Seats(self.inner.config, batch, slots, most, self.device)
        else:
            self.buffers.remove(seats)
        self.buffers.append(seats)
        self._capture(seats, temperature)
        return seats

    def _read_prompts(self, prompts: Sequence[Sequence[int]], seats: Seats) -> None:
        """All but the last token of each prompt into the cache, padded on the right: causal attention never looks."""
        seats.cache.restart()
        length = max(map(len, prompts)) - 1
        if length == 0:
            return
        ids = torch.full((seats.batch, length), self.pad, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt) - 1] = torch.tensor(prompt[:-1], dtype=torch.int64)
        with WORKSPACES:
            self.decoder(
                input_ids=sent(ids, self.device), position_ids=torch.arange(length, device=self.device)[None],
                past_key_values=seats.cache, use_cache=True, ragged_cache=seats.cache,
            )  # fmt: skip

    def _step(self, seats: Seats, temperature: float) -> None:
        """One token of every sequence. Reads and writes the seats' buffers only, and never waits."""
        if seats.fused is not None:
            seats.fused(temperature)
            return
        cache = seats.cache
        # the class's forward: what a trainer put around the instance's (the loss, a context of its own) has no part
        output = type(self.inner).forward(
            self.inner, input_ids=seats.token[:, None], position_ids=cache.lengths[:, None] - 1,
            past_key_values=cache, use_cache=True, ragged_cache=cache,
        )  # fmt: skip
        logits = output.logits[:, -1, : self.settings.vocab_size]
        token = sample_tokens(logits, seats.seeds, seats.made, temperature)
        if self.settings.log_probs:
            log_p = as_wide(logits).log_softmax(-1).gather(1, token[:, None])
            seats.log_probs.index_copy_(1, seats.column, log_p.to(seats.log_probs.dtype))
        live = ~seats.done
        seats.token.copy_(torch.where(live, token, self.pad))
        seats.answers.index_copy_(1, seats.column, seats.token[:, None])
        seats.column += 1
        seats.made += live
        seats.ended |= live & (token[:, None] == self.ends).any(1)
        seats.done |= seats.ended | (seats.made >= seats.limits)
        cache.lengths += ~seats.done

    @contextlib.contextmanager
    def _ready(self) -> Iterator[None]:
        """Eval mode, no gradients, our attention, autocast; all given back."""
        # weights that autocast remembers would be stale in a graph that is replayed after they changed
        autocast = torch.autocast(
            self.device.type,
            self.settings.autocast,
            enabled=self.settings.autocast is not None,
            cache_enabled=not self.replays,
        )
        with eval_mode(self.model), torch.no_grad(), autocast, attention_for_ragged_cache(self.model):
            yield

    def _capture(self, seats: Seats, temperature: float) -> None:
        """Record `STEPS` steps once for these buffers, this temperature, these weights' addresses and patches."""
        weights = tuple(parameter.data_ptr() for parameter in self.model.parameters())
        patches = tuple(id(module.__dict__.get("forward")) for module in self.model.modules())
        depends_on = (temperature, weights, patches)
        if seats.captured == depends_on:
            return
        seats.graph = None
        seats.fused = self.fused_steps.step_for(seats, self.ends, self.pad)
        seats.seat([], [], [], self.pad)  # all seats are done: the steps below write one slot and advance nothing
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                seats.column.zero_()
                self._step(seats, temperature)
            seats.column.zero_()
            waits = _waits_for_the_host(lambda: self._step(seats, temperature))
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        if waits is not None:
            self.replays = False
            log.warning("decoding runs without a CUDA graph, several times slower: the model's forward %s", waits)
            return
        seats.column.zero_()
        graph = torch.cuda.CUDAGraph()
        # other threads (NCCL's, a data loader's) may go on calling CUDA meanwhile
        with own_workspace(), torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            for _ in range(STEPS):
                self._step(seats, temperature)
        seats.graph, seats.captured = graph, depends_on


def _waits_for_the_host(step: Any) -> str | None:
    """Run `step`; what PyTorch says where an operation in it waits for the GPU, which a graph cannot hold."""
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


def as_wide(scores: torch.Tensor) -> torch.Tensor:
    """In float32, or wider where they are."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


@torch.no_grad()
def why_not(model: nn.Module) -> str | None:
    """Why `DecodeLoop` cannot serve `model`, found by trying it on a few tokens; None where it can.

    Two prompts of different lengths and two more tokens of each must give the logits of the model's own forward
    without a cache (soft cap of the attention scores included), up to the rounding of its dtype.
    """
    inner: Any = bare(model)
    if not getattr(inner, "_supports_attention_backend", False):
        return "it takes no other attention implementation"
    weight = next(model.parameters())
    # far above rounding, far below what a wrong position or key does
    device, tolerance = weight.device, min(0.1, 1e3 * max(torch.finfo(d).eps for d in (weight.dtype, torch.float32)))
    ids = torch.arange(12, device=device).reshape(2, 6) % inner.config.get_text_config().vocab_size
    forward, lengths = type(inner).forward, torch.tensor([4, 2], device=device)
    try:
        with eval_mode(model), soft_cap_kept(model):
            expected = forward(inner, input_ids=ids, use_cache=False).logits.float()
        cache = RaggedCache(inner.config, 2, 8, device)
        with eval_mode(model), attention_for_ragged_cache(model):
            positions = torch.arange(3, device=device)[None]
            decoder_of(model)(
                input_ids=ids[:, :3], position_ids=positions, past_key_values=cache, use_cache=True, ragged_cache=cache
            )
            cache.begin(lengths)
            for _ in range(2):
                at = cache.lengths[:, None] - 1
                given = forward(
                    inner, input_ids=ids.gather(1, at), position_ids=at, past_key_values=cache, use_cache=True,
                    ragged_cache=cache,
                ).logits[:, -1].float()  # fmt: skip
                right = expected[torch.arange(2, device=device), at[:, 0]]
                error = (given - right).norm() / right.norm()
                if not error < tolerance:
                    return f"its logits come out different by {error:.1e}"
                cache.lengths += 1
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:  # a forward of another make
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None
