"""The `data:` section of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from distill.core.errors import Section
from distill.recipe.fields import Count, NotNegative, Text, Usual

FormatName = Literal["auto", "text", "prompt_completion", "chat", "prompts"]


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
        turns: which assistant turns of a chat are answered. `last`: the last one of each example that `data.train_on`
            makes. `all`: every one, each after the conversation as the data have it up to there, tool results included;
            a chat's turns are kept in neighbouring rows, and what their prompts share is computed once (engines
            `distill` and `vllm`).
        max_new_tokens: the most an answer may have; less where a prompt leaves less of `max_length`.
        temperature: what the answers are drawn at; 0 for the likeliest tokens.
        top_k: draw from so many likeliest tokens; 0 for all.
        top_p: draw from the fewest likeliest tokens that have this probability together; 1 for all.
        min_p: draw from tokens with at least this share of the likeliest one's probability; 0 for all.
        stop: texts that end an answer, with the token that completes one.
        samples: answers of each prompt in a step; a micro-batch of `train.batch_size` rows holds as many times fewer
            prompts.
        engine: what generates: `distill` (our decode loop), `transformers`, or `vllm` where that is installed.
        batch_size: prompts of a step that are answered at once, at most.
        ahead: how many more steps' answers are drawn with those of a step, by the same weights, which are up to so many
            optimizer steps old when they learn; 0 for the student as it is in every step.
        store_every: write the answers of every so many steps into the run's folder, a parquet file a step; 0 for none.
    """

    fraction: Annotated[float, Field(ge=0, le=1)] = 1.0
    turns: Literal["last", "all"] = "last"
    max_new_tokens: Annotated[int, Field(ge=1, le=2**20)] = 128
    temperature: Annotated[NotNegative, Usual(0.2, 2)] = 1.0
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    stop: list[Text] = Field(default_factory=list)
    samples: Annotated[int, Field(ge=1, le=2**16)] = 1
    engine: Literal["distill", "transformers", "vllm"] = "distill"
    batch_size: Annotated[int, Field(ge=1, le=2**16)] = 64
    ahead: Annotated[int, Field(ge=0, le=64)] = 0
    store_every: Annotated[int, Field(ge=0, lt=2**31)] = 0


class MixedSource(Section):
    """One of several sources, with its share. What is left out is as `data` has it.

    Attributes:
        source: as `data.source`.
        weight: its share of the rows of an epoch, of the sum of all weights.
        subset: configuration of a hub data set.
        split: split of a hub data set, or of a folder whose files are named by split.
        format: `auto` decides by the columns.
        fields: which column holds what.
        train_on: which assistant turns of a chat are learned, as `data.train_on`.
        max_rows: read no more rows of the source than this, its first ones.
        teacher: the `route` of the teachers of all its rows, where no column names them (`fields.teacher`).
    """

    source: Text
    weight: Annotated[float, Field(gt=0)] = 1.0
    subset: Text | None = None
    split: Text | None = None
    format: FormatName | None = None
    fields: Fields | None = None
    train_on: Literal["all", "each", "last"] | None = None
    max_rows: Count | None = None
    teacher: Text | None = None


class Part(NamedTuple):
    """One source of the data.

    Attributes:
        field: of the recipe that names it.
        data: the section as if it were the only one.
        share: of the rows of an epoch; 1 of the only one.
        teacher: the route of all its rows; None where a column names it, or there are no routes.
    """

    field: str
    data: Data
    share: float = 1.0
    teacher: str | None = None


class Data(Section):
    """What is learned from.

    Attributes:
        source: `python-stdlib` (the installed Python's own library), `synthetic` or `synthetic:zipf` (random tokens),
            a hub id, or a local json, jsonl, parquet, csv or txt file, or a folder of them.
        sources: several of them in place of `source`, each with its share.
        subset: configuration of a hub data set.
        split: split of a hub data set, or of a folder whose files are named by split.
        format: `auto` decides by the columns. `prompts`: rows without answers, for `on_policy` with `fraction: 1`: a
            column `prompt`, chats up to the assistant's last turn, a text file with one prompt a line, or the folder of
            a run's stored rollouts.
        fields: which column holds what.
        chat_template: `tokenizer` for its own, `none`, or a .jinja file.
        max_length: tokens in a sequence.
        packing: put several documents into one sequence, without attention between them.
        train_on: which assistant turns of a chat are learned. `all` of them in one example; `each` in an example of its
            own, after exactly the prompt that inference would have; `last` the last one alone. `all` becomes `each`
            where the chat template writes earlier turns otherwise than the last one (Qwen3, GLM-4.5, gpt-oss).
        reasoning: what happens to an answer's reasoning (`reasoning_content`, `reasoning`, `thinking`, or `<think>` in
            its text). `keep` learns it where the chat template writes it, and names the rows that are learned without
            it; `require` drops and counts those rows; `drop` takes all reasoning out of the data.
        empty_answers: `drop` rows in which the assistant says nothing, or `keep` them, so that the student learns to
            end its turn at once.
        validation: what is held out.
        on_policy: answers that the student makes up itself while it learns; null for those of the data alone.
        max_rows: read no more rows of the source, or of each, than this, its first ones.
        workers: processes that tokenise and load.
        cache: keep the tokenised data for the next run.
    """

    source: Text
    sources: list[MixedSource] = Field(default_factory=list)
    subset: Text | None = None
    split: Text = "train"
    format: FormatName = "auto"
    fields: Fields = Fields()
    chat_template: Text = "tokenizer"
    max_length: Annotated[int, Field(ge=2, le=2**24)] = 1024
    packing: bool = True
    train_on: Literal["all", "each", "last"] = "all"
    reasoning: Literal["keep", "require", "drop"] = "keep"
    empty_answers: Literal["drop", "keep"] = "drop"
    validation: Validation = Validation()
    on_policy: OnPolicy | None = None
    max_rows: Count | None = None
    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    cache: bool = True

    @model_validator(mode="before")
    @classmethod
    def _source_or_sources(cls, tree: object) -> object:
        """Of several sources `source` names all."""
        if not isinstance(tree, dict) or not isinstance(given := tree.get("sources"), list) or not given:
            return tree
        names = " + ".join(str(part.get("source") if isinstance(part, dict) else part.source) for part in given)
        if tree.get("source") not in (None, names):
            raise ValueError("expected source or sources, got both")
        return {**tree, "source": names}

    @model_validator(mode="after")
    def _sources_hold_text(self) -> Self:
        if any(part.source.partition(":")[0] == "synthetic" for part in self.sources):
            raise ValueError("expected sources of text, got synthetic, which goes alone")
        return self

    @property
    def samples(self) -> int:
        """Rows that a micro-batch has of each row that is loaded: the student's answers to a prompt."""
        return 1 if self.own_answers is None else self.own_answers.samples

    @property
    def own_answers(self) -> OnPolicy | None:
        """`on_policy` where it replaces answers by the student's own; None also where its fraction is 0."""
        return self.on_policy if self.on_policy is not None and self.on_policy.fraction > 0 else None

    @property
    def answers_every_turn(self) -> bool:
        """Every assistant turn of a chat is an example of its own, and answered by the student."""
        return self.own_answers is not None and self.own_answers.turns == "all"

    @property
    def parts(self) -> list[Part]:
        """Every source with how it is read."""
        if not self.sources:
            return [Part("data.source", self)]
        total, found = sum(source.weight for source in self.sources), []
        for number, source in enumerate(self.sources):
            own = {name: value for name, value in source if value is not None and name not in ("weight", "teacher")}
            most = [rows for rows in (source.max_rows, self.max_rows) if rows is not None]
            data = self.model_copy(update={"sources": [], **own, "max_rows": min(most, default=None)})
            found.append(Part(f"data.sources.{number}.source", data, source.weight / total, source.teacher))
        return found
