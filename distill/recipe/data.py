"""The `data:` section of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from distill.core.errors import Section
from distill.recipe.fields import FUNCTION, ROUTE, Count, NotNegative, TemplateKwargs, Text, Usual

FormatName = Literal["auto", "text", "prompt_completion", "chat", "prompts"]


class Fields(Section):
    """Mapping of the data's columns; a field that is left out is read from the column of its own name.

    Attributes:
        text: column of plain text, all of which is trained on; null for `text`.
        prompt: column of prompts, masked from the loss; null for `prompt`.
        completion: column of the responses, which are trained on; null for `completion`.
        messages: column of chats, lists of messages with `role` and `content`; null for `messages`.
        system: column of system prompts, for rows whose messages have none; null for `system` or `system_prompt`.
        context: column of a text, or of several, that is read before the prompt; null for `context`.
        input: column of text that is read after the prompt; null for `input` beside the prompt `instruction`.
        reasoning: column of the reasoning before a completion; null for `reasoning_content`, `reasoning`, `thinking`.
        tools: column of the tools on offer; null for `tools` or `functions`.
        teacher: column that names the `route` of each row's teachers (`teachers[].route`).
    """

    text: Text | None = None
    prompt: Text | None = None
    completion: Text | None = None
    messages: Text | None = None
    system: Text | None = None
    context: Text | None = None
    input: Text | None = None
    reasoning: Text | None = None
    tools: Text | None = None
    teacher: Text | None = None

    def column(self, name: Literal["text", "prompt", "completion", "messages"]) -> str:
        """Return the column that holds `name`: as mapped, else `name` itself."""
        return getattr(self, name) or name


class PartOfData(Section):
    """One data set among several. Settings that are left out are those of `data`.

    Attributes:
        source: file, folder or hub data set, as in `data.source`.
        subset: configuration of a hub data set.
        split: split of a hub data set, or of a folder whose files are named by split.
        format: format of the rows, as `data.format`.
        fields: mapping of the columns, as `data.fields`.
        unread: columns that are not read on purpose, as `data.unread`.
        train_on: assistant turns of a chat that are trained on, as `data.train_on`.
        max_rows: maximum number of rows to read from its start; null for `data.max_rows`.
        teacher: the `route` of the teachers of all its rows, where no column names them (`fields.teacher`).
    """

    source: Text
    subset: Text | None = None
    split: Text | None = None
    format: FormatName | None = None
    fields: Fields | None = None
    unread: list[Text] | None = None
    train_on: Literal["all", "each", "last"] | None = None
    max_rows: Count | None = None
    teacher: Text | None = None

    def replacing(self) -> dict[str, object]:
        """Return the settings of `data` that this part has in their place."""
        given = {name: getattr(self, name) for name in PartOfData.model_fields if name != "teacher"}
        return {name: value for name, value in given.items() if value is not None}


class ValidationSet(PartOfData):
    """A further held-out set, whose figures carry its name. Settings that are left out are those of `data`.

    Attributes:
        train_on: assistant turns of a chat that are measured, as `data.train_on`.
        max_rows: maximum number of documents; null for that of `data.validation`.
        name: name of the set: its figures are `eval_NAME_kl`, `eval_NAME_agreement` and so on.
    """

    name: Annotated[str, Field(pattern=ROUTE)]


class Validation(Section):
    """The held-out data.

    Attributes:
        source: separate data set, as in `data.source`; null to hold out a part of the training documents.
        fraction: fraction of the training documents that is held out; not used with `source`, nor with
            `data.streaming`, which holds out the first `max_rows` rows.
        max_rows: maximum number of held-out documents (texts, chats, or prompts with responses); null for no limit.
        seed: seed of the held-out selection and of random tokens; separate from `train.seed`, so that runs with
            different `train.seed` are evaluated on the same rows.
        sets: further held-out sets beside this one, each measured by its own name whenever this one is.
    """

    source: Text | None = None
    fraction: Annotated[float, Field(gt=0, lt=1)] = 0.02
    max_rows: Count | None = 512
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    sets: list[ValidationSet] = Field(default_factory=list)

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [own.name for own in self.sets]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"sets: expected different names, got {name!r} twice")
        return self


class OnPolicy(Section):
    """On-policy distillation (GKD): responses are replaced by rollouts of the current student for the teacher to score.

    Attributes:
        fraction: fraction of the responses that is replaced, sampled anew at every step; 0 for none.
        turns: assistant turns of a chat that are generated. `last`: the last one of each example that `data.train_on`
            makes. `all`: every one, each after the data's own conversation up to it, tool results included; the turns
            of a chat are kept in neighbouring rows, and the shared prefix of their prompts is computed once (engines
            `distill` and `vllm`).
        max_new_tokens: maximum length of a response in tokens; less where a prompt leaves less of `max_length`.
        temperature: sampling temperature; 0 for greedy decoding.
        top_k: sample from this many most probable tokens; 0 for all.
        top_p: sample from the smallest set of most probable tokens whose total probability reaches this; 1 for all.
        min_p: sample from tokens with at least this fraction of the most probable token's probability; 0 for all.
        stop: stop strings; a response ends with the token that completes one.
        samples: responses per prompt in a step (group size); a micro-batch of `train.batch_size` rows holds
            `train.batch_size / samples` prompts.
        engine: generation engine: `distill` (the built-in decode loop), `transformers`, or `vllm` where that is
            installed.
        batch_size: maximum number of a step's responses that are generated at once.
        max_staleness: asynchronous rollouts: maximum age in optimizer steps of the weights that generated a step's
            responses. The responses of this many further steps are generated together with those of a step; 0
            generates with the current weights in every step.
        environment: `FILE.py:function`, called as function(messages, tools, row) after each response of a chat; it
            returns the next message or messages, such as a tool's result, to which the student responds again, or None
            at the end. `max_new_tokens` then bounds all responses and replies of a rollout. The run needs
            `--plugin FILE.py`. null for one response per rollout.
        environment_timeout: time limit of one call of the function, in seconds.
        max_turns: maximum number of responses in a rollout with an environment.
        reward: `FILE.py:function`, called as function(prompt, answer, row) for each response, as the reward of
            `loss.terms`: for a `teacher.context` and `loss.token_weights` that read rewards where no `policy_gradient`
            term has one. It returns a finite number, or the number and a text, the feedback on the response. The run
            needs `--plugin FILE.py`. null for none.
        reward_timeout: time limit of one call of the reward function, in seconds.
        store_every: interval in steps at which a step's responses are written to the run's folder, one parquet file per
            step; 0 for never.
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
    max_staleness: Annotated[int, Field(ge=0, le=64)] = 0
    environment: Annotated[str, Field(pattern=FUNCTION)] | None = None
    environment_timeout: Annotated[float, Field(gt=0, le=86400)] = 10.0
    max_turns: Annotated[int, Field(ge=2, le=1024)] = 8
    reward: Annotated[str, Field(pattern=FUNCTION)] | None = None
    reward_timeout: Annotated[float, Field(gt=0, le=86400)] = 10.0
    store_every: Annotated[int, Field(ge=0, lt=2**31)] = 0

    @property
    def environment_file(self) -> str:
        return (self.environment or "").rpartition(":")[0]


class MixedSource(PartOfData):
    """One of several data sources, with its mixing weight. Settings that are left out are those of `data`.

    Attributes:
        weight: mixing weight: the source's fraction of an epoch's rows, relative to the sum of all weights.
    """

    weight: Annotated[float, Field(gt=0)] = 1.0


class DataPart(NamedTuple):
    """One source of the data.

    Attributes:
        field: field of the recipe that names the source.
        data: the `data` section as if this were the only source.
        share: fraction of the rows of an epoch; 1 for the only source.
        teacher: route of all its rows; None where a column names it, or there are no routes.
    """

    field: str
    data: Data
    share: float = 1.0
    teacher: str | None = None


class Data(Section):
    """Training data and held-out data.

    Attributes:
        source: `python-stdlib` (source code of the installed Python's standard library), `synthetic` or
            `synthetic:zipf` (random tokens, uniform or Zipf-distributed), a hub id, or a local json, jsonl, parquet,
            csv or txt file, or a folder of them. Required, unless `sources` is given.
        sources: several sources in place of `source`, each with its mixing weight.
        subset: configuration of a hub data set.
        split: split of a hub data set, or of a folder whose files are named by split.
        format: format of the rows; `auto` detects it from the columns. `prompts`: rows without responses, for
            `on_policy` with `fraction: 1`: a column `prompt`, chats up to the last assistant turn, a text file with one
            prompt a line, or the folder of a run's stored rollouts.
        fields: names of the columns; one that is left out has the name of its field.
        unread: columns, and keys of messages as `messages.KEY`, that are not read on purpose. Without it the report of
            the data names each that is not read, and one that carries words of the conversation stops the run.
        chat_template: path of a .jinja file; `tokenizer` for the tokenizer's own template, `none` for no template.
        chat_template_kwargs: variables that the chat template reads beside messages and tools, such as
            `enable_thinking`, `reasoning_effort` or `documents`: in training, rollouts, samples and evaluation. A row's
            column `chat_template_kwargs` takes precedence, name by name.
        max_length: maximum length of a sequence in tokens. Plain text is split, and chats are truncated at it.
        packing: pack several documents into one sequence, without attention between them; false pads one per sequence.
        train_on: assistant turns of a chat that are trained on. `all` of them in one example; `each` in an example of
            its own, after exactly the prompt that inference would have; `last` the last one alone. `all` becomes `each`
            where the chat template renders earlier turns otherwise than the last one (Qwen3, GLM-4.5, gpt-oss).
        reasoning: treatment of a response's reasoning (`reasoning_content`, `reasoning`, `thinking`, or `<think>` in
            its text). `keep` trains on it where the chat template renders it, and reports the rows that are trained on
            without it; `require` drops and counts those rows; `drop` removes all reasoning from the data.
        empty_answers: `drop` rows with an empty assistant response, or `keep` them, so that the student is trained to
            end its turn at once.
        validation: held-out data.
        on_policy: training on student-generated responses; null trains on those of the data alone.
        streaming: read, tokenise and pack the rows while training, for data that do not fit on the disk or take long
            to tokenise. Needs `train.steps`; a source that ends is read again from its start. Without
            `validation.source` the first `validation.max_rows` rows are held out.
        shuffle_buffer: with `streaming`, number of documents that are read, shuffled and packed together; 0 keeps the
            order of the source.
        max_rows: maximum number of rows to read from the start of each source; null for no limit.
        workers: number of processes that tokenise and load the data; 0 uses the main process.
        cache: store the tokenised data for later runs, in the folder of the environment variable DISTILL_CACHE
            (`~/.cache/distill` by default).
    """

    source: Text
    sources: list[MixedSource] = Field(default_factory=list)
    subset: Text | None = None
    split: Text = "train"
    format: FormatName = "auto"
    fields: Fields = Fields()
    unread: list[Text] = Field(default_factory=list)
    chat_template: Text = "tokenizer"
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
    max_length: Annotated[int, Field(ge=2, le=2**24)] = 1024
    packing: bool = True
    train_on: Literal["all", "each", "last"] = "all"
    reasoning: Literal["keep", "require", "drop"] = "keep"
    empty_answers: Literal["drop", "keep"] = "drop"
    validation: Validation = Validation()
    on_policy: OnPolicy | None = None
    streaming: bool = False
    shuffle_buffer: Annotated[int, Field(ge=0, le=2**24)] = 4096
    max_rows: Count | None = None
    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    cache: bool = True

    @model_validator(mode="before")
    @classmethod
    def _source_or_sources(cls, tree: object) -> object:
        """Set `source` to the names of all `sources`, where these are given."""
        if not isinstance(tree, dict) or not isinstance(given := tree.get("sources"), list) or not given:
            return tree
        names = " + ".join(str(part.get("source") if isinstance(part, dict) else part.source) for part in given)
        if tree.get("source") not in (None, names):
            raise ValueError("expected source or sources, got both")
        return {**tree, "source": names}

    @model_validator(mode="after")
    def _sets_hold_text(self) -> Self:
        if self.validation.sets and self.is_synthetic:
            raise ValueError("validation.sets: expected a data.source of text, got random tokens")
        return self

    @model_validator(mode="after")
    def _sources_hold_text(self) -> Self:
        if any(part.source.partition(":")[0] == "synthetic" for part in self.sources):
            raise ValueError("expected sources of text, got synthetic, which goes alone")
        return self

    @property
    def is_synthetic(self) -> bool:
        """Return whether the data are random tokens."""
        return self.source.partition(":")[0] == "synthetic"

    @property
    def samples(self) -> int:
        """Rows of a micro-batch per row that is loaded: the responses to one prompt."""
        return 1 if self.active_on_policy is None else self.active_on_policy.samples

    @property
    def active_on_policy(self) -> OnPolicy | None:
        """`on_policy` where the student generates responses; None also where its fraction is 0."""
        return self.on_policy if self.on_policy is not None and self.on_policy.fraction > 0 else None

    @property
    def generates_every_turn(self) -> bool:
        """Return whether every assistant turn of a chat is an example of its own, generated by the student."""
        return self.active_on_policy is not None and self.active_on_policy.turns == "all"

    @property
    def parts(self) -> list[DataPart]:
        """Every source with the settings that it is read by."""
        if not self.sources:
            return [DataPart("data.source", self)]
        total = sum(source.weight for source in self.sources)
        found: list[DataPart] = []
        for number, source in enumerate(self.sources):
            most = [rows for rows in (source.max_rows, self.max_rows) if rows is not None]
            own = {**source.replacing(), "sources": [], "max_rows": min(most, default=None)}
            data = self.model_copy(update=own)
            found.append(DataPart(f"data.sources.{number}.source", data, source.weight / total, source.teacher))
        return found

    @property
    def set_parts(self) -> list[DataPart]:
        """Every further held-out set with the settings that it is read by."""
        found = []
        for number, held_out in enumerate(self.validation.sets):
            own = held_out.replacing()
            if own.get("format", self.format) == "prompts":  # the data's; held-out figures need responses
                own["format"] = "auto"
            data = self.model_copy(update={"sources": [], "max_rows": None, "streaming": False, **own})
            found.append(DataPart(f"data.validation.sets.{number}.source", data, teacher=held_out.teacher))
        return found
