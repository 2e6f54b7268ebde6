"""The three generation engines, by their names in `data.on_policy.engine`.

    distill       our decode loop (decode_loop.py): continuous batches, CUDA graphs, fused steps where the model allows
                  them; for training, where most time of a step would be spent in Python otherwise
    transformers  `generate` of the model itself: whatever transformers loads, also sharded over processes; for models
                  that the loop does not reproduce, and for the few greedy responses that people read
    vllm          vLLM in this process, where it is installed (vllm_engine.py)

All of them sample a token by its prompt's own seed, so that the first two draw the same tokens.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import LogitsProcessorList, StoppingCriteriaList

from distill.core import console
from distill.core.eval_mode import eval_mode
from distill.data.chat import ChatTemplate
from distill.generation.decode_loop import DecodeEngine, DecodeLoop, EngineSettings, Generated, Request
from distill.generation.prompts import Turn, encode_prompt
from distill.generation.sampling import Sampling, at_least_float32
from distill.generation.stopping import (
    StopStrings,
    end_tokens,
    override_generation_config,
    truncate_at_end,
    visible_text,
)
from distill.generation.support_check import unsupported_reason
from distill.models.head import unwrap_peft
from distill.models.patch.document_rope import generates_with_cache, rope_by_document, short_length
from distill.models.patch.fused_loss import log_once

log = logging.getLogger(__name__)

FEW = 16  # prompts that are answered one by one
ENGINES = ("distill", "transformers", "vllm")


def engine_for(
    name: str,
    model: nn.Module,
    settings: EngineSettings,
    *,
    tokenizer: Any = None,
    trains: bool = False,
    field: str = "data.on_policy.engine",
) -> DecodeEngine:
    """Return the engine `name` for `model`.

    Args:
        name: "distill", "transformers" or "vllm". Where the built-in loop would not reproduce the model's own logits
            (it is tried on a few tokens), transformers' `generate` takes its place, and one log line gives the reason.
        tokenizer: Passed to vLLM with the model.
        trains: The model's weights change between calls.
        field: The setting that an error names.

    Raises:
        ValueError: an unknown engine, or vLLM where it is not installed.
    """
    if name not in ENGINES:
        raise ValueError(f"{field}: expected one of {', '.join(ENGINES)}, got {name!r}")
    if name == "vllm":
        if importlib.util.find_spec("vllm") is None:
            raise ValueError(f"{field}: vllm is not installed (pip install vllm); engine distill needs nothing more")
        from distill.generation.vllm_engine import VllmEngine

        return VllmEngine(model, tokenizer, settings, trains)
    if name == "distill":
        reason = unsupported_reason(model)
        if reason is None:
            return DecodeLoop(model, settings)
        log.warning(
            "generating with transformers, which is slower: our decode loop cannot serve this model (%s)", reason
        )
    return TransformersEngine(model, settings)


def settings_for(
    model: nn.Module, tokenizer: Any, template: ChatTemplate | None, stop: Sequence[str] = (), **more: Any
) -> EngineSettings:
    """Return settings with a tokenizer's padding and the tokens that end a response; `more` as in `EngineSettings`."""
    more["stop"] = StopStrings(tokenizer, stop) if stop else None
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return EngineSettings(pad, end_tokens(tokenizer, model, template), **more)


def greedy_responses(
    model: Any, tokenizer: Any, prompts: Sequence[str | Sequence[Turn]], max_new_tokens: int = 48
) -> list[str]:
    """Return greedy responses for people to read, without the prompt and without special tokens.

    With a chat template each prompt becomes a user message; without one it is continued as text. The model's training
    mode is restored; a patched student generates by its own forward.

    Args:
        model: A causal language model, bare or inside PEFT.
        prompts: Plain texts, or chats, which need a chat template.
        max_new_tokens: Maximum length of a response; it ends earlier at an end-of-sequence token.
    """
    settings = settings_for(model, tokenizer, None)
    engine = TransformersEngine(model, settings)
    responses = []
    # samples one by one, so that no response depends on its neighbours; the many prompts of a task in batches
    size = 1 if len(prompts) <= FEW else FEW
    for begin in range(0, len(prompts), size):
        ids = [encode_prompt(tokenizer, prompt) for prompt in prompts[begin : begin + size]]
        generated = engine.generate(ids, max_new_tokens=max_new_tokens)
        responses += [visible_text(tokenizer, tokens, settings.ends) for tokens in generated.tokens]
        console.advance(len(ids))
    return responses


class TransformersEngine(DecodeEngine):
    """`model.generate` on left-padded batches.

    Args:
        collective: The model is sharded over all processes, which call the engine with the same arguments: each
            generates its part of the batches, and returns all responses. Every layer is gathered from all processes
            when it is called, so that none may stop before the last response of any is finished.
    """

    def __init__(self, model: nn.Module, settings: EngineSettings, *, collective: bool = False) -> None:
        self.model = model
        self.pad = settings.pad
        self.ends = sorted(set(settings.ends))
        self.autocast = settings.autocast
        self.collective = collective
        self.log_probs = settings.log_probs
        self.inner: Any = unwrap_peft(model)
        self.device = next(model.parameters()).device
        self.columns = settings.vocab_size
        self.stop = settings.stop
        self._logged: set[str] = set()
        rope_by_document(model)

    def run(self, request: Request) -> Generated:
        return self._run_on_all_processes(request) if self.collective else self._run_here(request)

    def _run_on_all_processes(self, request: Request) -> Generated:
        """Generate this process's part and gather all; with the same logits, the responses are those of one process.

        Log-probabilities are not gathered.
        """
        batch_size = request.batch_size
        rank = dist.get_rank()
        world = dist.get_world_size()
        result = Generated([], [])
        # it takes part in each call of a layer, though it has no prompts left: one token from padding
        padding = Request([[self.pad]], [1], [0], request.sampling, batch_size)
        # every process goes through the same rounds, also one whose part of the last round is empty
        for start in range(0, len(request.prompts), batch_size * world):
            first = start + rank * batch_size
            numbers = range(len(request.prompts))[first : first + batch_size]
            own = self._run_here(request.of(numbers) if numbers else padding)
            parts: list[Any] = [None] * world
            dist.all_gather_object(parts, (own.tokens, own.truncated) if numbers else ([], []))
            for tokens, truncated in parts:
                result.tokens.extend(tokens)
                result.truncated.extend(truncated)
        return result

    def _run_here(self, request: Request) -> Generated:
        prompts = request.prompts
        limits = request.limits
        result = Generated([[] for _ in prompts], [True] * len(prompts), [[] for _ in prompts])
        autocast = torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None)
        with torch.no_grad(), eval_mode(self.model), autocast:
            for numbers, use_cache in self._batches(request):
                batch = request.of(numbers)
                seeds = torch.tensor(batch.seeds, device=self.device)
                sampler = _SeededSampler(self.columns, request.sampling, seeds)
                responses = self._generate_batch(batch.prompts, max(batch.limits), sampler, use_cache)
                for number, drawn, log_probs in zip(numbers, responses, sampler.log_probs(), strict=True):
                    tokens, truncated = truncate_at_end(drawn, limits[number], self.ends, self.stop)
                    result.tokens[number] = tokens
                    result.truncated[number] = truncated
                    result.log_probs[number] = log_probs[: len(tokens)] if self.log_probs else []
        return result

    def _batches(self, request: Request) -> Iterator[tuple[list[int], bool]]:
        """Yield the prompts of each batch, and whether it may keep a cache.

        A model of LongRoPE drops the cache of a batch once, so that the sequences of one have to outgrow the short set
        together: they are of one length. Where the number of batches must not depend on the prompts, as with a model
        that is sharded, or where the model does not drop it, a batch that could outgrow it has no cache.
        """
        longest = [len(prompt) + limit for prompt, limit in zip(request.prompts, request.limits, strict=True)]
        limit = short_length(self.inner)
        outgrown = limit is not None and max(longest, default=0) > limit
        keeps = not outgrown or (not self.collective and generates_with_cache(self.inner, max(longest)))
        if not keeps:
            log_once(
                self._logged,
                "cache",
                "generating without a key-value cache, which is slow: sequences outgrow the %d tokens of LongRoPE's "
                "short set",
                limit,
            )
        order = list(range(len(request.prompts)))
        groups = [order]
        if outgrown and keeps:
            wanted = [number for number in order if request.limits[number] > 0]
            by_length = sorted(wanted, key=lambda number: len(request.prompts[number]))
            groups = [
                list(same) for _, same in itertools.groupby(by_length, key=lambda number: len(request.prompts[number]))
            ]
        for group in groups:
            for start in range(0, len(group), request.batch_size):
                yield group[start : start + request.batch_size], keeps

    def _generate_batch(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampler: _SeededSampler, use_cache: bool
    ) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[self.pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with override_generation_config(self.inner, max_new_tokens=max_new_tokens, pad=self.pad, ends=self.ends):
            out = self.inner.generate(
                input_ids=ids.to(self.device),
                attention_mask=mask.to(self.device),
                use_cache=use_cache,
                logits_processor=LogitsProcessorList([sampler]),
                synced_gpus=self.collective or None,
                stopping_criteria=StoppingCriteriaList([self.stop.criterion(width)] if self.stop else []),
            )
        tokens: list[list[int]] = out[:, width:].tolist()
        return tokens


class _SeededSampler:
    """Logits processor that samples each row's token as the decode loop does, from the row's own seed.

    It leaves `generate` one token to choose, so that neither other rows nor the number of processes matter.
    """

    def __init__(self, columns: int | None, sampling: Sampling, seeds: torch.Tensor) -> None:
        self.columns = columns
        self.sampling = sampling
        self.seeds = seeds
        self.made = torch.zeros_like(seeds)
        self._log_probs: list[torch.Tensor] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores [B, V] of the next tokens of [B, S]: 0 at the sampled token, else -inf."""
        known = scores[:, : self.columns]
        token = self.sampling.sample(known, self.seeds, self.made)[:, None]
        self._log_probs.append(at_least_float32(known).log_softmax(-1).gather(1, token))
        self.made += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)

    def log_probs(self) -> list[list[float]]:
        """Return the sampled tokens' log-probabilities, with those that padding replaces after a response's end."""
        found: list[list[float]] = torch.cat(self._log_probs, 1).tolist()
        return found
