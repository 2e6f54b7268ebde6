"""Rows of the training data, as reward functions and environments get them for a response.

A document of a batch knows the row that it comes from (`distill.data.source_rows`); here that row's columns are read
from disk, and its messages before the response.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from distill.data.chat import template_of
from distill.data.formats import RowFormat
from distill.data.load import format_of, source_of
from distill.data.source_rows import StoredRows, store_rows
from distill.generation.documents import RolloutDocument
from distill.generation.function_calls import FunctionInput
from distill.generation.stopping import response_text
from distill.recipe import Recipe


class TableSource(NamedTuple):
    """Rows of one source, and the format that they are read in."""

    name: str
    format: RowFormat
    rows: StoredRows


class RowTable:
    """Rows of all sources of the training data.

    Args:
        sources: sources of the training data, in the order of the recipe.
        ends: tokens that end a response.
    """

    def __init__(self, sources: Sequence[TableSource], tokenizer: Any, ends: Collection[int]) -> None:
        self.sources = sources
        self.tokenizer = tokenizer
        self.ends = ends

    def function_input(self, document: RolloutDocument, response: Sequence[int]) -> FunctionInput:
        """Return the question for a response to a document's prompt, with the row that the document was made of."""
        place = document.source_row
        assert place is not None and place.source >= 0, "a batch of the training data, with SourceRowColumn"
        source = self.sources[place.source]
        row = source.rows[place.row]
        sample = source.format.sample(row)
        prompt = sample.prompt or "" if sample.messages is None else sample.messages[: place.message]
        answer = response_text(self.tokenizer, response, self.ends)
        return FunctionInput(f"row {place.row} of {source.name}", prompt, answer, row, sample.tools)


def row_table_from_recipe(recipe: Recipe, tokenizer: Any, ends: Collection[int]) -> RowTable:
    contexts = [section.context for section in (recipe.teacher, *recipe.teachers) if section.context is not None]
    private = [column for context in contexts for column in context.columns]
    sources = []
    for part in recipe.data.parts:
        source = source_of(part)
        format = format_of(source, part.data, [template_of(part.data, tokenizer)]).without(private)
        rows = store_rows(source, max_rows=part.data.max_rows, cache=part.data.cache)
        sources.append(TableSource(source.name, format, rows))
    return RowTable(sources, tokenizer, ends)
