"""One row, read in its format as a `ConversationSample`: text, a prompt and completion, or a chat with tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from distill.data.known_columns import CHAT, MEDIA, PROMPTS, REASONING, TEMPLATE_KWARGS, TEXT, is_blank
from distill.data.read_messages import Conversation, parsed_json, read_history, read_messages, read_tools
from distill.data.rows import RawRow, RowFault, TableRow
from distill.data.sampled_rows import COLUMNS as SAMPLED_COLUMNS
from distill.data.sampled_rows import SAMPLED, SampledIds
from distill.recipe.fields import template_kwargs_error

if TYPE_CHECKING:
    from distill.data.formats import RowFormat
    from distill.data.rendering import Message, Tools


class Unread(NamedTuple):
    """Column of a row, or key of its messages (`messages.KEY`), that is not read.

    Attributes:
        name: Its name, as in `data.unread`.
        carries_words: It carries words of the conversation.
    """

    name: str
    carries_words: bool = False


class ConversationSample(NamedTuple):
    """Document before tokenisation.

    Attributes:
        prompt: Prompt of a pair, masked from the loss, before `text`.
        tools: JSON schemas of the tools available in a chat.
        first_trained: Index of the first message that may be trained on.
        template_kwargs: The row's own variables of the chat template.
        unread: What of the row is not read.
        sampled: Token ids of the prompt and the answer, of a row that `distill sample` wrote.
        truncated: The answer was cut off when it was generated: it has no end.
    """

    text: str | None = None
    messages: list[Message] | None = None
    prompt: str | None = None
    tools: Tools = None
    first_trained: int = 0
    template_kwargs: dict[str, Any] | None = None
    unread: tuple[Unread, ...] = ()
    sampled: SampledIds | None = None
    truncated: bool = False


class RowReader:
    """Reader of one row; it collects what of the row is not read."""

    def __init__(self, format: RowFormat, row: RawRow) -> None:
        self.format = format
        self.columns = format.columns_of(row)
        self.row = row
        self.unread: list[Unread] = []
        self.tools: Tools = None

    def sample(self) -> ConversationSample:
        if self.format.kind == TEXT:
            sample = ConversationSample(text=_text(self.row, self.columns["text"]))
        else:
            self._refuse_unwanted()
            self.tools = self._tools()
            sample = self._prompt() if self.format.kind == PROMPTS else self._pair_or_chat()
            sample = self._with_system(sample)
            if sample.messages is not None:
                sample = sample._replace(template_kwargs=template_kwargs(self._value(TEMPLATE_KWARGS)))
        if "rendered" not in self.columns:  # stored rollouts, whose other columns are the run's own
            self._name_unread(sample)
        unread = {item.name: item for item in self.unread}
        return sample._replace(tools=self.tools, unread=tuple(unread.values()))

    def _value(self, role: str) -> Any:
        return self.row.get(self.columns[role]) if role in self.columns else None

    def _refuse_unwanted(self) -> None:
        """Raise for a row with images or another medium, and for a response that is not wanted (KTO)."""
        for name in MEDIA:
            is_read = name in self.format.ignored or name in self.columns.values()
            if not is_read and not is_blank(self.row.get(name)):
                raise RowFault("not text", f"column {name!r}; data.unread: [{name}] trains on the text alone")
        label = self._value("label")
        if label is False or (isinstance(label, str) and label.strip().lower() == "false"):
            raise RowFault("a response that is not wanted", f"column {self.columns['label']!r} is false")
        if not is_blank(label) and label is not True and str(label).strip().lower() != "true":
            self.unread.append(Unread(self.columns["label"]))  # a class, not whether the response is wanted

    def _tools(self) -> Tools:
        if "tools" not in self.columns:
            return None
        column = self.columns["tools"]
        return read_tools(self.row.get(column), column, adds_nulls=self._adds_nulls)

    @property
    def _adds_nulls(self) -> bool:
        return isinstance(self.row, TableRow)

    def _messages(self, column: str) -> list[Message]:
        found: Conversation = read_messages(
            self.row.get(column),
            column,
            adds_nulls=self._adds_nulls,
            ignored=self.format.ignored,
            template_reads=self.format.template_reads,
        )
        self.unread += [Unread(name) for name in sorted(found.unread)]
        if found.tools is not None:
            if self.tools and self.tools != found.tools:
                raise RowFault("tools in two places", f"column {column!r} and a column of tools")
            self.tools = found.tools
        return found.messages

    def _pair_or_chat(self) -> ConversationSample:
        if self.format.kind == CHAT:
            return ConversationSample(messages=self._with_chosen(self._messages(self.columns["messages"])))
        prompt = self.columns["prompt"]
        completion = self.columns["completion"]
        prompted = self.row.get(prompt)
        answered = self.row.get(completion)
        if isinstance(prompted, list):
            if not self.format.pairs_as_chat:
                raise RowFault(
                    "a chat without a chat template",
                    f"column {prompt!r} holds messages; give data.chat_template a .jinja file, or the tokenizer of an "
                    "instruct model",
                )
            turns = self._messages(prompt)
            if isinstance(answered, str):
                answer = _text(self.row, completion, keeps_empty=self.format.keeps_empty)
                return ConversationSample(messages=[*turns, self._answer(answer)], first_trained=len(turns))
            return ConversationSample(messages=turns + self._messages(completion), first_trained=len(turns))
        question = self._question(prompt)
        if self.format.pairs_as_chat and _is_reply(answered):
            turns = [*self._history(), {"role": "user", "content": question}]
            return ConversationSample(messages=turns + self._messages(completion))
        answer = self._first_answer(completion)
        if self.format.pairs_as_chat:
            turns = [*self._history(), {"role": "user", "content": question}, self._answer(answer)]
            return ConversationSample(messages=turns)
        joint = "" if question[-1:].isspace() or answer[:1].isspace() else "\n"
        return ConversationSample(text=answer, prompt=question + joint)

    def _with_chosen(self, messages: list[Message]) -> list[Message]:
        chosen = self._value("chosen")
        if is_blank(chosen):
            return messages
        column = self.columns["chosen"]
        if messages[-1]["role"] == "assistant":
            if chosen != self.row.get(self.columns["messages"]):
                self.unread.append(Unread(column))
            return messages
        if isinstance(chosen, str):
            return [*messages, {"role": "assistant", "content": chosen}]
        return [*messages, *self._messages(column)]

    def _answer(self, text: str) -> Message:
        reasoning = self._value("reasoning")
        if is_blank(reasoning):
            return {"role": "assistant", "content": text}
        if not isinstance(reasoning, str):
            raise RowFault("wrong type", f"column {self.columns['reasoning']!r}: expected text")
        return {"role": "assistant", "content": text, REASONING[0]: reasoning}

    def _first_answer(self, column: str) -> str:
        """Return the text of a completion; of several answers (SQuAD) the first one."""
        value = self.row.get(column)
        answers = value.get("text") if isinstance(value, Mapping) else value if column == "answers" else None
        if not isinstance(answers, list):
            return _text(self.row, column, keeps_empty=self.format.keeps_empty)
        if len({str(answer) for answer in answers}) > 1 and f"{column}.others" not in self.format.ignored:
            self.unread.append(Unread(f"{column}.others"))
        return _text({column: answers[0] if answers else ""}, column, keeps_empty=self.format.keeps_empty)

    def _question(self, column: str) -> str:
        """Return the text of a prompt, with the context before it and the input after it."""
        text = _text(self.row, column)
        context = self._value("context")
        if isinstance(context, list) and all(isinstance(part, str) for part in context):
            context = "\n\n".join(context)
        before = _as_text(context)
        after = _as_text(self._value("input"))
        if before.strip() and before.strip() not in text:
            text = f"{before}\n\n{text}"
        return f"{text}\n\n{after}" if after.strip() else text

    def _history(self) -> list[Message]:
        value = self._value("history")
        return [] if is_blank(value) else read_history(value, self.columns["history"])

    def _prompt(self) -> ConversationSample:
        (role, column), *_ = self.columns.items()
        if role == "messages" or isinstance(self.row.get(column), list):
            return ConversationSample(messages=_without_last_answer(self._messages(column)))
        text = self._question(column)
        if role == "prompt" and self.format.pairs_as_chat:
            return ConversationSample(messages=[*self._history(), {"role": "user", "content": text}])
        return ConversationSample(text="", prompt=text if role == "rendered" or text[-1:].isspace() else text + "\n")

    def _with_system(self, sample: ConversationSample) -> ConversationSample:
        system = self._value("system")
        if sample.messages is None or not isinstance(system, str) or not system.strip():
            return sample
        own = next((message for message in sample.messages[:1] if message["role"] in ("system", "developer")), None)
        if own is not None and own["content"].strip():
            if own["content"].strip() != system.strip():
                self.unread.append(Unread(self.columns["system"]))
            return sample
        if own is not None:
            return sample._replace(messages=[{**own, "content": system}, *sample.messages[1:]])
        messages = [{"role": "system", "content": system}, *sample.messages]
        # one message more in front: the index moves by one
        return sample._replace(messages=messages, first_trained=sample.first_trained + 1)

    def _name_unread(self, sample: ConversationSample) -> None:
        used = [message["content"] for message in sample.messages or ()] + [sample.prompt or "", sample.text or ""]
        unread = self.format.unread_columns(self.row, [text for text in used if isinstance(text, str)])
        # columns of `distill sample` are read by the encoders
        self.unread += [item for item in unread if SAMPLED not in self.row or item.name not in SAMPLED_COLUMNS]
        known = {*self.format.template_reads, *self.format.ignored}
        variables = sample.template_kwargs or {}
        names = [f"{TEMPLATE_KWARGS}.{name}" for name, value in variables.items() if not is_blank(value)]
        self.unread += [Unread(name) for name in names if name not in known]


def template_kwargs(value: object) -> dict[str, Any] | None:
    """Return a row's own variables of the chat template; a null is a name that only other rows of a table have.

    Raises:
        RowFault: It is neither an object nor its JSON text, or gives what the data and the run give.
    """
    if isinstance(value, str) and value.strip():
        value = parsed_json(value, TEMPLATE_KWARGS)
    if not value:
        return None
    if not isinstance(value, Mapping):
        raise RowFault("wrong type", f"column {TEMPLATE_KWARGS!r}: expected an object, got {type(value).__name__}")
    given = {name: item for name, item in value.items() if item is not None}
    error = template_kwargs_error(given)
    if error is not None:
        raise RowFault("wrong value", f"column {TEMPLATE_KWARGS!r}: {error}")
    return given


def _without_last_answer(messages: list[Message]) -> list[Message]:
    """Return messages up to the last one that the assistant did not write."""
    count = len(messages)
    while count and messages[count - 1]["role"] == "assistant":
        count -= 1
    if not count:
        raise RowFault("no question", "nothing precedes the assistant's messages")
    return messages[:count]


def _is_reply(value: object) -> bool:
    """Return whether a completion is one message or a list of them that begins with the assistant's."""
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, Mapping) and (first.get("role") or first.get("from")) in ("assistant", "gpt")


def _as_text(value: object) -> str:
    if is_blank(value):
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _text(row: RawRow, column: str, *, keeps_empty: bool = False) -> str:
    value = row.get(column)
    if value is None:
        raise RowFault("null", f"column {column!r}") if column in row else RowFault("no value", f"column {column!r}")
    if not isinstance(value, str):
        raise RowFault("wrong type", f"column {column!r}: expected text, got {type(value).__name__}")
    if not value.strip() and not keeps_empty:
        raise RowFault("empty", f"column {column!r}")
    return value
