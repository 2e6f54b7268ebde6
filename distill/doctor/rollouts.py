"""On-policy rollouts for doctor: responses of the student replace the data's, as in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from distill.core.eval_mode import eval_mode
from distill.data.chat import template_of
from distill.doctor.rewards import SubstituteContexts, substitute_rewards
from distill.generation.decode_loop import EngineSettings
from distill.generation.documents import Readers, documents_of
from distill.generation.engines import engine_for, settings_for
from distill.generation.on_policy import OnPolicyRollouts
from distill.generation.sampling import Sampling, sampling_of
from distill.recipe import Recipe
from distill.teachers.rows.context.rollouts import routes_of_run_contexts

MOST_NEW_TOKENS = 16


@dataclass(frozen=True)
class StudentRollouts:
    """Rollout settings as plain numbers, which can be sent to another process.

    Attributes:
        engine: `distill` or `transformers`.
        fraction: Fraction of the documents whose responses are replaced in training.
        sampling, seed, max_length, max_new_tokens, batch_size: See `OnPolicyRollouts`.
        pad, ends, vocab_size: See `EngineSettings`.
        reward_scale: `group` or `none` where the loss has a reward, which training runs replace; None without one.
        context_routes: Routes whose teacher's context is made from the run, by number; None for the only teacher.
    """

    engine: str
    fraction: float
    sampling: Sampling
    seed: int
    max_length: int
    max_new_tokens: int
    batch_size: int
    pad: int
    ends: tuple[int, ...]
    vocab_size: int | None
    reward_scale: str | None = None
    context_routes: tuple[int | None, ...] = ()

    @staticmethod
    def of_recipe(recipe: Recipe, student: nn.Module, tokenizer: Any, vocab_size: int | None) -> StudentRollouts:
        """Return the settings of a recipe's `data.on_policy`, with short responses and without stop strings.

        One response per prompt, and at least half of the documents. vLLM is replaced by our engine: starting it for
        truncated copies
        is not worth its time, and rollouts are checked, not the engine.
        """
        section = recipe.data.on_policy
        assert section is not None
        settings = settings_for(student, tokenizer, template_of(recipe.data, tokenizer))
        return StudentRollouts(
            "distill" if section.engine == "vllm" else section.engine,
            max(section.fraction, 0.5),
            sampling_of(section),
            recipe.train.seed,
            recipe.data.max_length,
            min(section.max_new_tokens, MOST_NEW_TOKENS),
            section.batch_size,
            settings.pad,
            tuple(settings.ends),
            vocab_size,
            None if recipe.loss.rewarded is None else recipe.loss.rewarded.reward_scale,
            routes_of_run_contexts(recipe),
        )

    def by(self, student: nn.Module, fraction: float | None = None, log_probs: bool = False) -> OnPolicyRollouts:
        settings = EngineSettings(
            self.pad, self.ends, vocab_size=self.vocab_size, max_length=self.max_length, log_probs=log_probs
        )
        engine = engine_for(self.engine, student, settings, trains=True)
        return OnPolicyRollouts(
            engine,
            fraction=self.fraction if fraction is None else fraction,
            max_new_tokens=self.max_new_tokens,
            sampling=Sampling(*self.sampling),
            seed=self.seed,
            max_length=self.max_length,
            batch_size=self.batch_size,
            log_probs=log_probs,
            contexts=SubstituteContexts(self.context_routes, self.max_length) if self.context_routes else None,
        )

    def in_training(self, student: nn.Module) -> OnPolicyRollouts:
        """Return `OnPolicyRollouts` for a training run: with two responses per prompt where the loss has a reward."""
        own = self.by(student)
        if self.reward_scale is not None:
            own.samples = 2
            own.rewards = substitute_rewards(self.reward_scale)
        return own

    def with_responses(
        self, student: nn.Module, batches: Sequence[Mapping[str, Any]], readers: Readers | None = None
    ) -> list[dict[str, list[int]]]:
        """Return rows of one document each with the student's response.

        Responses depend on weights, seed and document, not on the batches.

        Args:
            batches: Collated micro-batches of such rows, with the teacher's columns.
            readers: Read responses by the teachers' tokenizers, where these are others, by route.
        """
        with eval_mode(student):
            own = replace(self.by(student, fraction=1.0), readers=readers or {})
            made = own.replace([dict(batch) for batch in batches], 0, lambda rows: {"rows": rows})
        return [row for batch in made for row in batch["rows"]]


def prompts_of(batch: Mapping[str, Any]) -> list[list[int]]:
    """Return the prompt of each document's last response in a collated batch with the teacher's columns."""
    return [document.prompt for document in documents_of(batch)]
