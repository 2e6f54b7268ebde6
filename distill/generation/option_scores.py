"""Multiple choice by log-probability: the option that a model finds most probable after the prompt is its answer.

The score of an option is the sum of the log-probabilities of its tokens, `log p(option | prompt)`, or that sum divided
by the number of its tokens or of its UTF-8 bytes. As in EleutherAI's lm-evaluation-harness (whose `acc` is the sum, and
whose `acc_norm` divides by characters, which are bytes of ASCII text), prompt and option are tokenised together and cut
where the prompt's own tokens end, and white space at the prompt's end belongs to the option.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from distill_kernels import fused_log_probs
from distill_kernels.losses.head import call_inside
from torch import nn

from distill.core import console
from distill.core.eval_mode import eval_mode
from distill.data.tokenise import tokens_before_text
from distill.generation.prompts import render_prompt
from distill.models.head import HeadWeights, LogitTransform, call_head, decoder_of, find_head


class OptionPrompt(NamedTuple):
    """A prompt with its options.

    Attributes:
        location: Its row, as error messages name it.
        text: Text of the prompt.
        options: Text of each option.
    """

    location: str
    text: str
    options: Sequence[str]


class OptionTokens(NamedTuple):
    """Tokens of a prompt, and of one option after it."""

    prompt: list[int]
    option: list[int]


def encode_options(tokenizer: Any, prompt: OptionPrompt, *, chat: bool) -> list[OptionTokens]:
    """Return the tokens of each option after the prompt.

    Args:
        chat: The prompt is a user's message of the tokenizer's chat template, where it has one, and the option begins
            the response; else the option continues the prompt as text, after a space.

    Raises:
        ValueError: An option has no token of its own.
    """
    rendered = render_prompt(tokenizer, prompt.text) if chat else None
    before = [] if rendered is not None else tokens_before_text(tokenizer)
    found = []
    for option in prompt.options:
        if rendered is not None:
            context = rendered
            continuation = option
        else:
            context = prompt.text.rstrip()
            joint = prompt.text[len(context) :]
            if not joint and not option[:1].isspace():
                joint = " "
            continuation = joint + option
        own = list(tokenizer(context, add_special_tokens=False).input_ids)
        whole = list(tokenizer(context + continuation, add_special_tokens=False).input_ids)
        if len(whole) <= len(own) or not before + own:
            raise ValueError(
                f"eval.tasks: {prompt.location}: expected a prompt and tokens of the option {option!r:.80}"
            )
        found.append(OptionTokens(before + own, whole[len(own) :]))
    return found


@dataclass(frozen=True)
class OptionScorer:
    """Scores the options of prompts by a model.

    Attributes:
        model: A causal language model, bare, inside PEFT or sharded by FSDP2, for which every process calls the methods
            with the same prompts. Its train or eval mode is restored.
        tokenizer: Its tokenizer, with its chat template.
        transform: Scale and soft cap of its logits.
        batch_size: Options of a forward.
        autocast: Autocast dtype, as in training; None for the dtype of the weights.
    """

    model: nn.Module
    tokenizer: Any
    transform: LogitTransform
    batch_size: int
    autocast: torch.dtype | None = None

    def choose(self, prompts: Sequence[OptionPrompt], *, chat: bool, normalise: str) -> list[str]:
        """Return the most probable option of each prompt; of equal ones the first.

        Args:
            chat: As of `encode_options`.
            normalise: `none`, `tokens` or `bytes`: what the log-probability of an option is divided by.
        """
        groups = [encode_options(self.tokenizer, prompt, chat=chat) for prompt in prompts]
        values = iter(self.log_probs([row for group in groups for row in group]))
        chosen = []
        for prompt, group in zip(prompts, groups, strict=True):
            scores = [
                next(values) / _length(option, row, normalise)
                for option, row in zip(prompt.options, group, strict=True)
            ]
            chosen.append(prompt.options[scores.index(max(scores))])
        return chosen

    @torch.no_grad()
    def log_probs(self, rows: Sequence[OptionTokens]) -> list[float]:
        """Return the log-probability of each option after its prompt, in nats."""
        device = next(self.model.parameters()).device
        scores = [0.0] * len(rows)
        # the longest first: rows of a batch are of about one length, and too large a batch fails at once
        order = sorted(range(len(rows)), key=lambda number: -len(rows[number].prompt) - len(rows[number].option))
        with eval_mode(self.model), torch.autocast(device.type, self.autocast, enabled=self.autocast is not None):
            for begin in range(0, len(order), self.batch_size):
                numbers = order[begin : begin + self.batch_size]
                batch = [rows[number] for number in numbers]
                values = self._of_batch(batch, device).double().cpu()
                sums = values.split([len(row.option) for row in batch])
                for number, value in zip(numbers, sums, strict=True):
                    scores[number] = value.sum().item()
                console.advance(len(batch))
        return scores

    def _of_batch(self, rows: Sequence[OptionTokens], device: torch.device) -> torch.Tensor:
        """Return the log-probability of each option's tokens, fp32, one option after the other."""
        width = max(len(row.prompt) + len(row.option) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        positions: list[int] = []
        for index, row in enumerate(rows):
            tokens = row.prompt + row.option
            # padding follows the tokens, which causal attention does not look at
            ids[index, : len(tokens)] = torch.tensor(tokens)
            # the position before a token predicts it
            positions += range(index * width + len(row.prompt) - 1, index * width + len(tokens) - 1)
        scored = torch.tensor(positions)
        labels = ids.flatten()[scored + 1].to(device)
        scored = scored.to(device)

        def log_probs(hidden: torch.Tensor, head: HeadWeights) -> torch.Tensor:
            if not torch.is_autocast_enabled(device.type):
                hidden = hidden.to(head.weight.dtype)
            return fused_log_probs(
                hidden,
                head.weight,
                labels,
                bias=head.bias,
                lora=head.lora,
                logit_scale=self.transform.scale,
                softcap=self.transform.softcap,
            )

        def forward(ids: torch.Tensor) -> torch.Tensor:
            hidden = decoder_of(self.model)(input_ids=ids, use_cache=False).last_hidden_state
            return call_head(find_head(self.model), hidden.flatten(0, 1)[scored], log_probs)

        # inside the model's own call, where FSDP2 has gathered the embedding
        return call_inside(self.model, forward, ids.to(device))


def _length(option: str, row: OptionTokens, normalise: str) -> int:
    if normalise == "tokens":
        return len(row.option)
    return max(1, len(option.encode())) if normalise == "bytes" else 1
