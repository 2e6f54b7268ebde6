"""Prompts from a file, read as the data of a run are read, with or without responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from distill.data.chat import ChatTemplate, template_kwargs_of
from distill.data.formats import FieldMap, RowFormat, with_columns_beside
from distill.data.known_columns import CHAT_COLUMNS, PAIR_COLUMNS, TEMPLATE_KWARGS
from distill.data.load import require_words_are_read
from distill.data.row_counts import RowCounts
from distill.data.row_reader import ConversationSample
from distill.data.rows import RawRow, RowFault
from distill.data.sampled_rows import MESSAGE
from distill.data.sources import open_source, prompt_lines
from distill.data.tokenise import tokens_before_text

Turn = dict[str, str]  # of a chat: role and content


@dataclass
class RolloutPrompt:
    """One prompt.

    Attributes:
        ids: token ids, up to where the response begins.
        row: columns at the beginning of an output row: `prompt`, or `messages` (and `tools`).
        text: text of the prompt, as the chat template renders it.
    """

    ids: list[int]
    row: dict[str, Any]
    text: str = ""

    @property
    def messages(self) -> list[dict[str, Any]]:
        return list(self.row.get("messages") or [{"role": "user", "content": self.row["prompt"]}])

    def with_response(self, response: str, message: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the row with its response, in a format of `data.source`.

        Args:
            message: The response in parts; None where its text is all of it.
        """
        if "messages" not in self.row:
            return self.row | {"completion": response} | ({MESSAGE: message} if message else {})
        turns = [*self.row["messages"], message or {"role": "assistant", "content": response}]
        return self.row | {"messages": turns}

    def matches(self, row: Any) -> bool:
        if not isinstance(row, dict):
            return False
        if "messages" in self.row:
            return isinstance(row.get("messages"), list) and row["messages"][:-1] == self.row["messages"]
        return row.get("prompt") == self.row["prompt"]


@dataclass
class Prompts(RowCounts):
    """The usable prompts of a file, in its order, and a tally of the others."""

    prompts: list[RolloutPrompt] = field(default_factory=list)


def read_prompts(
    path: str,
    tokenizer: Any,
    template: ChatTemplate | None,
    fields: FieldMap,
    *,
    max_length: int,
    ignored: Sequence[str] = (),
) -> Prompts:
    """Read prompts from a file.

    Args:
        path: A text file with one prompt a line, or anything `data.source` takes whose rows hold `prompt` (or
            `question`, `instruction`, `query`) or `messages`; responses in it are not used, and of a chat the last
            assistant turns are left out.
        tokenizer: Tokenizer of the model that generates.
        template: Chat template: a plain prompt becomes a user message; None to continue prompts as text.
        fields: The recipe's `data.fields`.
        max_length: Prompts of more tokens are dropped and counted.
        ignored: The recipe's `data.unread`.

    Raises:
        ValueError: the file cannot be read, has no column of prompts, or no usable row.
    """
    found = Prompts()
    beginning = tokens_before_text(tokenizer)
    reader: RowFormat | None = None
    for number, row in enumerate(prompt_lines(open_source(path, field="--prompts"), path).rows()):
        found.rows_read += 1
        with found.row(number):
            if isinstance(row, RowFault):
                raise row
            if reader is None:
                reader = _format(row, fields, path, template is not None, ignored)
            is_text = isinstance(row.get(reader.columns.get("prompt", "")), str)
            sample = reader.sample(row)
            found.see_unread(sample.unread)
            prompt = _prompt(sample, is_text, tokenizer, template, beginning)
            if not prompt.ids:
                raise RowFault("empty")
            if len(prompt.ids) > max_length:
                raise RowFault("too long", f"{len(prompt.ids):,} tokens, and {max_length:,} leave room for a response")
            found.prompts.append(prompt)
    if reader is not None:
        require_words_are_read(found, reader, path)
    if not found.prompts:
        raise ValueError(f"--prompts: {path} holds no usable prompt{found.reasons and f': {found.reasons}'}")
    return found


def _format(row: RawRow, fields: FieldMap, path: str, has_template: bool, ignored: Sequence[str]) -> RowFormat:
    """Return the format with the column of the prompt: as mapped, else by the names in common use."""
    chat = fields.messages or next((name for name in CHAT_COLUMNS if name in row), None)
    prompt = fields.prompt if fields.prompt in row else next((name for name, _ in PAIR_COLUMNS if name in row), None)
    if prompt is None and chat in row:
        if not has_template:
            raise ValueError(
                "data.chat_template: the prompts are chats and the tokenizer has no chat template; give a .jinja file"
            )
        format = RowFormat("prompts", {"messages": chat}, pairs_as_chat=True, ignored=tuple(ignored))
        return with_columns_beside(format, list(row), fields)
    if prompt is None:
        columns = ", ".join(map(repr, row)) or "none"
        raise ValueError(f"--prompts: expected a column prompt or messages in {path}; its columns are {columns}")
    format = RowFormat("prompts", {"prompt": prompt}, pairs_as_chat=has_template, ignored=tuple(ignored))
    return with_columns_beside(format, list(row), fields)


def _prompt(
    sample: ConversationSample, is_text: bool, tokenizer: Any, template: ChatTemplate | None, beginning: list[int]
) -> RolloutPrompt:
    if sample.messages is None:
        text = sample.prompt or ""
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return RolloutPrompt(ids if ids[:1] == beginning else beginning + ids, {"prompt": text}, text)
    if template is None:
        raise RowFault("a chat without a chat template")
    text = template.prompt(sample.messages, sample.tools, sample.template_kwargs)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    own = {TEMPLATE_KWARGS: sample.template_kwargs} if sample.template_kwargs else {}
    if is_text and len(sample.messages) == 1:
        return RolloutPrompt(ids, {"prompt": sample.messages[0]["content"]} | own, text)
    return RolloutPrompt(
        ids, {"messages": sample.messages} | ({"tools": sample.tools} if sample.tools else {}) | own, text
    )


def encode_prompt(tokenizer: Any, prompt: str | Sequence[Turn]) -> list[int]:
    """Return the token ids of a prompt: a user message of the chat template, or plain text where there is none.

    Several turns are a chat, which needs a template; its keyword arguments are those that the tokenizer is saved with.
    """
    text = render_prompt(tokenizer, prompt)
    if text is None:
        return list(tokenizer(prompt).input_ids)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def render_prompt(tokenizer: Any, prompt: str | Sequence[Turn]) -> str | None:
    """Return a prompt as the chat template renders it, up to where the response begins; None without a template."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    kwargs = template_kwargs_of(tokenizer)
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **kwargs))
