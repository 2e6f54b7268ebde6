"""Prompts of a teacher whose context is made from the run: its reading of a row, with the text that the run gives."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from distill.core.labels import IGNORE_INDEX
from distill.data.chat import ChatOptions, template_of
from distill.data.load import format_of, source_of
from distill.data.row_counts import RowCounts
from distill.generation.documents import RolloutDocument
from distill.generation.rollout_contexts import ContextRequest, RunContext
from distill.recipe import Data, DataPart, Recipe
from distill.recipe.teachers import TeacherPrompt, describe_teacher, teacher_prompt
from distill.teachers.rows.context.data import ContextEncoder, TwoPrompts, context_room

UNBOUNDED = 2**31 - 1  # of documents that are read again: the caller knows how long they may be

_warn_once = functools.cache(logging.getLogger(__name__).warning)


class RolloutReader:
    """Maker of the teacher's prompts of one route.

    Args:
        encoders: Encoders by the number of the source.
    """

    def __init__(self, encoders: dict[int, ContextEncoder]) -> None:
        self.encoders = encoders

    def prompts(self, requests: Sequence[ContextRequest]) -> list[list[int] | None]:
        """Return the teacher's tokens before each response; None where its row cannot have the context."""
        found: list[list[int] | None] = [None] * len(requests)
        for source, encoder in self.encoders.items():
            numbers = [n for n, request in enumerate(requests) if _source_of(request.document) == source]
            tally = RowCounts()
            # The row is read as the data are, with another context: the template, its checks and the alignment of both
            # readings are the same.
            encoder.texts = {n: requests[n].text for n in numbers}
            for both in encoder.documents([(n, requests[n].row) for n in numbers], tally):
                assert isinstance(both, TwoPrompts)
                ids = _prompt_before(both, requests[both.row].document)
                if ids is not None:
                    found[both.row] = ids
            for reason in tally.dropped:
                _warn_once("teacher.context: some responses have no context: %s", reason)
        return found


def _source_of(document: RolloutDocument) -> int:
    assert document.source_row is not None, "a batch of the training data, with SourceRowColumn"
    return document.source_row.source


def _prompt_before(both: TwoPrompts, document: RolloutDocument) -> list[int] | None:
    """Return the teacher's tokens before a document's response; None in readings of other turns of its row."""
    begin = len(document.prompt)
    first = int((both.labels != IGNORE_INDEX).argmax())
    if first > begin or not np.array_equal(both.ids[:begin], document.prompt):
        return None
    # from the first trained token on both readings are the same tokens, aligned from their ends
    ids: list[int] = both.teacher_ids[: begin + len(both.teacher_ids) - len(both.ids)].tolist()
    return ids


def run_contexts(recipe: Recipe, tokenizer: Any) -> dict[int | None, RunContext]:
    """Return the contexts of a recipe's teachers that are made from the run, by the number of the route."""
    data = recipe.data
    names = list(dict.fromkeys(describe_teacher(recipe).routes))
    found: dict[int | None, RunContext] = {}
    for route, prompt in _prompts_from_run(recipe).items():
        assert prompt.context is not None
        encoders = {
            source: _encoder(part, data, tokenizer, prompt)
            for source, part in enumerate(data.parts)
            if route is None or part.teacher in (None, names[route])
        }
        found[route] = RunContext(prompt.context, context_room(data, [prompt]), RolloutReader(encoders))
    return found


def routes_of_run_contexts(recipe: Recipe) -> tuple[int | None, ...]:
    """Return the numbers of the routes whose teachers have such contexts; None stands for the only route."""
    return tuple(_prompts_from_run(recipe))


def _prompts_from_run(recipe: Recipe) -> dict[int | None, TeacherPrompt]:
    """Return the prompts of the teachers whose context is made from the run, by the number of the route."""
    description = describe_teacher(recipe)
    names = list(dict.fromkeys(description.routes))
    found: dict[int | None, TeacherPrompt] = {}
    for number, section in enumerate(description.members.values()):
        prompt = teacher_prompt(recipe.data, section)
        if prompt is not None and prompt.context is not None and prompt.context.of_the_run:
            found[names.index(description.routes[number]) if names else None] = prompt
    return found


def _encoder(part: DataPart, data: Data, tokenizer: Any, prompt: TeacherPrompt) -> ContextEncoder:
    template = template_of(data, tokenizer)
    format = format_of(source_of(part), part.data, [template])
    options = ChatOptions.of(part.data)
    return ContextEncoder(tokenizer, format, template, max_length=UNBOUNDED, options=options).after(prompt)
