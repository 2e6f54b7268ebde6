"""The `data:` section of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from distill.core.faults import Section
from distill.recipe.fields import Count, NotNegative, Text


class Fields(Section):
    """Which column holds what; a field left out is looked for under its own name.

    Attributes:
        text: running text, all of it learned.
        prompt: what is read.
        completion: the answer to it, which is learned.
        messages: a chat, a list of messages with `role` and `content`.
        teacher: which of `teachers` teaches the row, by its `route`.
    """

    text: Text | None = None
    prompt: Text | None = None
    completion: Text | None = None
    messages: Text | None = None
    teacher: Text | None = None

    def column(self, name: Literal["text", "prompt", "completion", "messages"]) -> str:
        """The column that holds `name`: as mapped, else `name` itself."""
        return getattr(self, name) or name


class Validation(Section):
    """What is held out.

    Attributes:
        source: a data set of its own, or null to hold out a share of the training documents.
        fraction: the share of the documents that is held out where no source is given.
        max_rows: hold out no more rows of the source (texts with all their pieces, chats, pairs) than this.
        seed: chooses them, and what random tokens are drawn; apart from `train.seed`, so that runs that differ by that
            are judged on the same rows.
    """

    source: Text | None = None
    fraction: Annotated[float, Field(gt=0, lt=1)] = 0.02
    max_rows: Count | None = 512
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0


class OnPolicy(Section):
    """The student's own words: some answers are replaced by what it says now, and the teacher judges those (GKD).

    Attributes:
        fraction: share of the answers that are replaced, drawn anew at every step; 0 for none.
        max_new_tokens: the most an answer may have; less where a prompt leaves less of `max_length`.
        temperature: what the answers are drawn at; 0 for the likeliest tokens.
        engine: what generates: `distill` (our decode loop), `transformers`, or `vllm` where that is installed.
        batch_size: prompts that are answered at once, at most.
    """

    fraction: Annotated[float, Field(ge=0, le=1)] = 1.0
    max_new_tokens: Annotated[int, Field(ge=1, le=2**20)] = 128
    temperature: NotNegative = 1.0
    engine: Literal["distill", "transformers", "vllm"] = "distill"
    batch_size: Annotated[int, Field(ge=1, le=2**16)] = 64


class Data(Section):
    """What is learned from.

    Attributes:
        source: `python-stdlib` (the installed Python's own library), `synthetic` or `synthetic:zipf` (random tokens),
            a hub id, or a local json, jsonl, parquet, csv or txt file, or a folder of them.
        subset: configuration of a hub data set.
        split: split of a hub data set, or of a folder whose files are named by split.
        format: `auto` decides by the columns.
        fields: which column holds what.
        chat_template: `tokenizer` for its own, `none`, or a .jinja file.
        max_length: tokens in a sequence.
        packing: put several documents into one sequence, without attention between them.
        train_on: which assistant turns of a chat are learned.
        validation: what is held out.
        on_policy: answers that the student makes up itself while it learns; null for those of the data alone.
        max_rows: read no more rows of the source than this, its first ones.
        workers: processes that tokenise and load.
        cache: keep the tokenised data for the next run.
    """

    source: Text
    subset: Text | None = None
    split: Text = "train"
    format: Literal["auto", "text", "prompt_completion", "chat"] = "auto"
    fields: Fields = Fields()
    chat_template: Text = "tokenizer"
    max_length: Annotated[int, Field(ge=2, le=2**24)] = 1024
    packing: bool = True
    train_on: Literal["all", "last"] = "all"
    validation: Validation = Validation()
    on_policy: OnPolicy | None = None
    max_rows: Count | None = None
    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    cache: bool = True
