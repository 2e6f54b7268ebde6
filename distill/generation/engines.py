"""What generates: our own decode loop, transformers' `generate`, or vLLM where it is installed and asked for."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from distill.core.eval_mode import eval_mode
from distill.data.chat import ChatTemplate
from distill.generation.decode_loop import DecodeLoop, Engine, EngineSettings, Generated, Request
from distill.generation.sampling import Sampling, as_wide
from distill.generation.stopping import StopStrings, ended
from distill.generation.trial import why_not
from distill.models.head import bare
from distill.models.kv_cache import PreallocatedCache, unsupported_layers

log = logging.getLogger(__name__)

ENGINES = ("distill", "transformers", "vllm")


def engine_for(
    name: str,
    model: nn.Module,
    settings: EngineSettings,
    *,
    tokenizer: Any = None,
    trains: bool = False,
    field: str = "data.on_policy.engine",
) -> Engine:
    """The engine `name` for `model`.

    Args:
        name: "distill", "transformers" or "vllm". Where our own loop would not give the model's own logits (it is
            tried on a few tokens), transformers' `generate` takes its place, and one log line says why.
        tokenizer: vLLM gets it with the model.
        trains: The model's weights change between calls.
        field: What an error names.

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
        reason = why_not(model)
        if reason is None:
            return DecodeLoop(model, settings)
        log.warning(
            "generating with transformers, which is slower: our decode loop cannot serve this model (%s)", reason
        )
    return TransformersEngine(model, settings)


def settings_for(
    model: nn.Module, tokenizer: Any, template: ChatTemplate | None, stop: Sequence[str] = (), **more: Any
) -> EngineSettings:  # fmt: skip
    """Settings with a tokenizer's padding and what ends an answer; `more` as of `EngineSettings`."""
    more["stop"] = StopStrings(tokenizer, stop) if stop else None
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return EngineSettings(pad, end_tokens(tokenizer, model, template), **more)


def end_tokens(tokenizer: Any, model: nn.Module, template: ChatTemplate | None) -> list[int]:
    """Tokens that end an answer: the tokenizer's, the model's own, and what closes a turn of the chat template, plain
    or with tool calls."""
    configured = getattr(getattr(bare(model), "generation_config", None), "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])}
    if template is not None:
        ends |= {tokenizer.convert_tokens_to_ids(token) for token in template.closings()}
    return sorted(token for token in ends if token is not None)


@contextlib.contextmanager
def as_asked(
    model: Any, *, most: int, pad: int | None, ends: Sequence[int], temperature: float = 0.0
) -> Iterator[None]:  # fmt: skip
    """Inside, `model.generate` draws at this temperature and from nothing else.

    A chat model's own configuration would bring penalties and cut-offs, and transformers' a top-k of 50.
    """
    inner: Any = bare(model)
    own = inner.generation_config
    drawn: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    inner.generation_config = GenerationConfig(
        max_new_tokens=most, pad_token_id=pad, eos_token_id=sorted(set(ends)) or None,
        **(drawn if temperature > 0 else {"do_sample": False}),
    )  # fmt: skip
    try:
        yield
    finally:
        inner.generation_config = own


class TransformersEngine(Engine):
    """`model.generate` on batches padded on the left, with our preallocated cache where the model's layers allow.

    With `together`, all processes go on until the last of them is finished: for a model that they hold in shards.
    """

    def __init__(self, model: nn.Module, settings: EngineSettings, *, together: bool = False) -> None:
        self.model, self.pad, self.ends = model, settings.pad, sorted(set(settings.ends))
        self.autocast, self.together, self.log_probs = settings.autocast, together, settings.log_probs
        self.inner: Any = bare(model)
        self.device = next(model.parameters()).device
        self.columns, self.stop = settings.vocab_size, settings.stop

    def answer(self, request: Request) -> Generated:
        prompts, limits, seeds, sampling, batch_size = request
        result = Generated([], [])
        autocast = torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None)
        with torch.no_grad(), eval_mode(self.model), autocast:
            for start in range(0, len(prompts), batch_size):
                chosen = slice(start, start + batch_size)
                draws = _Draws(self.columns, sampling, torch.tensor(seeds[chosen], device=self.device))
                answers = self._answer_batch(prompts[chosen], max(limits[chosen]), draws)
                for drawn, log_probs, limit in zip(answers, draws.log_probs(), limits[chosen], strict=True):
                    tokens, truncated = ended(drawn, limit, self.ends, self.stop)
                    result.tokens.append(tokens)
                    result.truncated.append(truncated)
                    result.log_probs.append(log_probs[: len(tokens)] if self.log_probs else [])
        return result

    def _answer_batch(self, prompts: Sequence[Sequence[int]], most: int, draws: _Draws) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[self.pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        cache = None
        # who is finished goes on beside the others, beyond what was asked for
        if not self.together and not unsupported_layers(self.inner.config):
            cache = PreallocatedCache(self.inner.config, width + most)
        with as_asked(self.inner, most=most, pad=self.pad, ends=self.ends):
            out = self.inner.generate(
                input_ids=ids.to(self.device), attention_mask=mask.to(self.device), use_cache=True,
                logits_processor=LogitsProcessorList([draws]), past_key_values=cache,
                synced_gpus=self.together or None,
                stopping_criteria=StoppingCriteriaList([self.stop.criterion(width)] if self.stop else []),
            )  # fmt: skip
        tokens: list[list[int]] = out[:, width:].tolist()
        return tokens


class _Draws:
    """Leaves `generate` one token of each row, drawn as our decode loop draws it: from the row's own seed, so that
    neither the rows beside it nor the number of processes play a part."""

    def __init__(self, columns: int | None, sampling: Sampling, seeds: torch.Tensor) -> None:
        self.columns, self.sampling, self.seeds, self.made = columns, sampling, seeds, torch.zeros_like(seeds)
        self._log_probs: list[torch.Tensor] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores [B, V] of the next tokens of [B, S]; 0 at the one that is drawn, else -inf."""
        known = scores[:, : self.columns]
        token = self.sampling.draw(known, self.seeds, self.made)[:, None]
        self._log_probs.append(as_wide(known).log_softmax(-1).gather(1, token))
        self.made += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)

    def log_probs(self) -> list[list[float]]:
        """Of the tokens drawn, also of those that padding replaces after an answer's end."""
        found: list[list[float]] = torch.cat(self._log_probs, 1).tolist()
        return found


class AnswersTogether(Engine):
    """An engine for all processes of a run, which hold the model in shards: every one must call it with the same
    arguments, answers its part of the prompts, and gets all answers.

    The batches are those of one process: with the same logits the answers are the same. Every layer is gathered from
    all processes when it is called, so that none may stop before the last answer of any is finished, and one that has
    no prompts left answers a token of padding. `engine` is this process's, made with `together`.
    """

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine

    def answer(self, request: Request) -> Generated:
        prompts, limits, seeds, sampling, batch_size = request
        rank, world = dist.get_rank(), dist.get_world_size()
        result = Generated([], [])
        for start in range(0, len(prompts), batch_size * world):
            mine = slice(start + rank * batch_size, start + (rank + 1) * batch_size)
            own = Request(prompts[mine], limits[mine], seeds[mine], sampling, batch_size)
            padding = Request([[self.engine.pad]], [1], [0], sampling, batch_size)
            answers = self.engine.answer(own if own.prompts else padding)
            parts: list[Any] = [None] * world
            dist.all_gather_object(parts, (answers.tokens, answers.truncated) if own.prompts else ([], []))
            for tokens, truncated in parts:
                result.tokens.extend(tokens)
                result.truncated.extend(truncated)
        return result
