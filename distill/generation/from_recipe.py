"""On-policy generation as configured by a recipe's `data.on_policy`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from distill.recipe import Recipe
from distill.recipe.reward import reward_of
from distill.recipe.teachers import written_teachers

if TYPE_CHECKING:
    from distill.data.chat import ChatTemplate
    from distill.data.collator import BatchColumns
    from distill.data.report import DataReport
    from distill.generation.documents import Readers
    from distill.generation.on_policy import OnPolicyRollouts
    from distill.generation.rollout_contexts import RunContext


def require_prompts(recipe: Recipe, tokenizer: Any, format: str) -> None:
    """Require, before any model is read, that the data have prompts where `data.on_policy` is set.

    Raises:
        ValueError: they are random tokens or running text.
    """
    if recipe.data.active_on_policy is not None and (tokenizer is None or format.startswith("text")):
        raise ValueError(
            f"data.on_policy: expected data with prompts, got {format or 'random tokens'}; give chats, or "
            "prompts with completions (whose completions are not used where fraction is 1)"
        )


def rollout_columns(recipe: Recipe) -> Sequence[BatchColumns]:
    """Return the columns of training batches that a recipe's reward, environment, or context from the run needs."""
    section = recipe.data.active_on_policy
    if section is None:
        return ()
    reads_run = any(own.context is not None and own.context.of_the_run for own in written_teachers(recipe))
    if section.environment is None and reward_of(recipe.loss, section) is None and not reads_run:
        return ()
    from distill.data.source_rows import SourceRowColumn

    return (SourceRowColumn(),)


def rollouts_from_recipe(
    recipe: Recipe,
    student: Any,
    tokenizer: Any,
    *,
    template: ChatTemplate | None,
    report: DataReport,
    vocab_size: int,
    autocast: torch.dtype | None = None,
    sharded: bool = False,
    models: Sequence[nn.Module] = (),
    readers: Readers | None = None,
    contexts: Mapping[int | None, RunContext] | None = None,
    code: bytes | None = None,
    folder: Path | None = None,
) -> OnPolicyRollouts | None:
    """Return the rollouts that the recipe's `data.on_policy` configures; None without it, or if its fraction is 0.

    Args:
        student: Student on its device, before any wrapping.
        template: chat template of the data; None without one.
        vocab_size: Number of columns that the loss compares: the teacher has no other tokens.
        autocast: Compute dtype of the student where that is not its weights'.
        sharded: The student will be sharded over the processes.
        models: Models that read rollouts: packed data become one row where attention of all allows it.
        readers: Readers of the vocabulary (`answer_readers`).
        contexts: Contexts that are made from the run, by the number of the route.
        code: Content of the file of reward and environment, which `--plugin` has allowed.
        folder: Folder of the run, to which an environment's replies are written.

    Raises:
        ValueError: data without prompts, vLLM absent.
    """
    section = recipe.data.active_on_policy
    if section is None:
        return None
    from distill.generation.engines import engine_for, settings_for
    from distill.generation.on_policy import OnPolicyRollouts
    from distill.generation.sampling import sampling_of
    from distill.models.patch.attention import attends_within_documents
    from distill.models.patch.snapshot import Snapshot

    require_prompts(recipe, tokenizer, report.format)
    snapshot = Snapshot(student) if sharded else None
    settings = settings_for(
        student,
        tokenizer,
        template,
        section.stop,
        autocast=autocast,
        vocab_size=vocab_size,
        max_length=min(recipe.data.max_length, report.longest + section.max_new_tokens),
        log_probs=True,
    )
    generating = student if snapshot is None else snapshot.model
    engine = engine_for(section.engine, generating, settings, tokenizer=tokenizer, trains=True)
    one_row = recipe.data.packing and bool(models) and all(map(attends_within_documents, models))
    graphed = bool(recipe.train.cuda_graph) and next(student.parameters()).is_cuda
    # a row then has one of 16 lengths, so that few shapes are captured
    room = recipe.train.batch_size * recipe.data.max_length if one_row and graphed else 0
    multiple = max(64, room // 1024 * 64) if one_row or graphed else 1
    reward = reward_of(recipe.loss, section)
    environment = None
    rewards = None
    from_run = None
    if section.environment is not None or reward is not None or contexts:
        from distill.generation.reward_rows import row_table_from_recipe

        look_up = row_table_from_recipe(recipe, tokenizer, settings.ends).function_input
    if section.environment is not None:
        from accelerate import PartialState

        from distill.generation.environment import ChatFormat, Environment, EnvironmentFunction, EnvironmentLog

        assert code is not None, "--plugin was checked"
        if template is None:
            raise ValueError("data.on_policy.environment: needs chats, and a chat template to render its replies by")
        name = section.environment.rpartition(":")[2]
        function = EnvironmentFunction(Path(section.environment_file), code, name, section.environment_timeout)
        chat = ChatFormat(template, tokenizer, frozenset(settings.ends))
        log = EnvironmentLog(folder, PartialState().process_index)
        environment = Environment(function, look_up, chat, section.max_turns, log)
    if reward is not None:
        from distill.generation.function_calls import RewardFunction
        from distill.generation.rewards import Rewards

        assert code is not None, "--plugin was checked"
        reward_function = RewardFunction(Path(reward.file), code, reward.name, reward.timeout)
        reward_function.field = reward.field
        rewards = Rewards(reward_function.judge, look_up, reward.scale)
    if contexts:
        from distill.generation.rollout_contexts import RolloutContexts

        from_run = RolloutContexts(contexts, look_up, recipe.data.max_length)
    return OnPolicyRollouts(
        engine,
        fraction=section.fraction,
        max_new_tokens=section.max_new_tokens,
        sampling=sampling_of(section),
        seed=recipe.train.seed,
        max_length=recipe.data.max_length,
        batch_size=section.batch_size,
        samples=section.samples,
        max_staleness=section.max_staleness,
        student=student,
        snapshot=snapshot,
        log_probs=True,
        multiple=multiple,
        one_row=one_row,
        readers=readers or {},
        environment=environment,
        rewards=rewards,
        contexts=from_run,
    )
