"""Columns of rows and keys of messages: how each is read, and which carry words of the conversation.

The one table of names, as data: `formats` and `read_messages` read by it, the data report names what is in none of it,
and `scripts.docs` writes the lists of the page *Data formats*. A key of a message is called `messages.KEY` in
`data.unread` and in the report, to tell it from a column.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

# kinds of rows, as in data.format
TEXT = "text"
PAIR = "prompt_completion"
CHAT = "chat"
PROMPTS = "prompts"

# column names in common use, tried in this order when the recipe maps none
CHAT_COLUMNS = ("messages", "conversations", "conversation", "chat")
PAIR_COLUMNS = (
    ("prompt", "completion"),
    ("question", "answer"),
    ("question", "answers"),
    ("question", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("prompt", "response"),
    ("query", "response"),
    ("input", "output"),
)
TEXT_COLUMNS = ("text", "content")
TEMPLATE_KWARGS = "chat_template_kwargs"  # column of a row's own variables of the chat template (TRL)
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
REASONING = ("reasoning_content", "reasoning", "thinking")  # names that chat templates read
REASONING_ALIASES = ("thinking_content", "thought", "thoughts")  # of other tools, read as the first of REASONING
TRAINED = ("weight", "train", "training", "loss")  # names of other tools for whether a message is trained on
TRAINED_PARTS = ("train_detail", "training_detail")  # which characters of a message are trained on (axolotl)


class Known(NamedTuple):
    """Columns, or keys of messages, that are read in one way.

    Attributes:
        role: Name of what they hold: a key of `Format.columns`, and of `data.fields` where that has it.
        names: Names in common use, the first one present is read.
        kinds: Kinds of rows in which they are read; () for keys of messages.
        reading: How they are read, for the documentation.
    """

    role: str
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    reading: str


# read beside the columns of the prompt, the completion or the messages
COLUMNS = (
    Known("system", ("system", "system_prompt"), (PAIR, CHAT, PROMPTS), "system prompt of rows that have none"),
    Known("history", ("history",), (PAIR, PROMPTS), "earlier turns before the prompt: pairs of question and answer"),
    Known("context", ("context",), (PAIR, PROMPTS), "texts before the prompt; beside `instruction` after it (Dolly)"),
    Known("input", ("input",), (PAIR, PROMPTS), "text after the prompt `instruction` (Alpaca)"),
    Known("reasoning", (*REASONING, *REASONING_ALIASES), (PAIR,), "reasoning before the completion"),
    Known("tools", ("tools", "functions"), (PAIR, CHAT, PROMPTS), "tools on offer: JSON schemas, or JSON text of them"),
    Known("chosen", ("chosen",), (CHAT,), "the response, where the messages end without one"),
    Known("label", ("label", "kto_tag"), (PAIR, CHAT), "false: the response is not wanted (KTO), the row is dropped"),
    Known(TEMPLATE_KWARGS, (TEMPLATE_KWARGS,), (PAIR, CHAT, PROMPTS), "variables of the chat template for this row"),
    Known("media", MEDIA, (PAIR, CHAT, PROMPTS), "a row that has any is dropped: only text is trained on"),
)
NEEDS_TEMPLATE = {"system", "history", "reasoning", "tools", "chat_template_kwargs"}  # roles that only chats have

KEYS = (
    Known("role", ("role", "from"), (), "who writes the message; `human`, `gpt`, `bot`, `model` and others are mapped"),
    Known("content", ("content", "value"), (), "its text, or parts of text and reasoning"),
    Known("reasoning", (*REASONING, *REASONING_ALIASES, "reasoning_details"), (), "reasoning before the content"),
    Known("channel", ("channel",), (), "`analysis` (harmony): the message is the reasoning of the one after it"),
    Known("tool_calls", ("tool_calls", "function_call"), (), "calls; their arguments as an object or as JSON text"),
    Known("tool_call_id", ("tool_call_id",), (), "the call that a tool's result belongs to"),
    Known("name", ("name",), (), "name of the tool or the writer; counted where the template does not render it"),
    Known("tools", ("tools", "functions"), (), "of a system message: the tools on offer"),
    Known("trained", TRAINED, (), "0 or false: an assistant's message is not trained on"),
    Known("trained_parts", TRAINED_PARTS, (), "ranges of characters that are trained on, both ends included"),
    Known("refusal", ("refusal",), (), "a row whose answer is one is dropped"),
    Known("prefix", ("prefix",), (), "true: an answer to be continued, the row is dropped"),
    Known("media", MEDIA, (), "a row that has any is dropped"),
)
READ_KEYS = frozenset(name for key in KEYS for name in key.names)

# columns that carry words of the conversation: where no `Known` reads them, the run stops until the recipe says
WORDS = frozenset(
    {
        *("system", "system_prompt", "system_message", "system_instruction", "history", "tools", "functions"),
        *("context", "contexts", "passage", "passages", "document", "documents", "input", "inputs"),
        *("question", "query", "prompt", "instruction", "choices", "options"),
        *("weight", "weights", "sample_weight"),
        *(*REASONING, *REASONING_ALIASES, *MEDIA),
    }
)
WEIGHTS = frozenset({"weight", "weights", "sample_weight"})
REJECTED = re.compile(r"rejected(_.*)?")
RESPONSES = frozenset(second for _, second in PAIR_COLUMNS) | set(CHAT_COLUMNS)
QUESTIONS = frozenset({"question", "query", "prompt", "instruction"})  # one is the prompt; a chat holds them itself

ANNOTATED = re.compile(r"""\.([A-Za-z_]\w*)|\[\s*["']([A-Za-z_]\w*)["']\s*\]|["']([A-Za-z_]\w*)["']\s*(?:in\b|,|\))""")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


def is_blank(value: object) -> bool:
    """Return whether a value holds nothing: null, white space, an empty list or object, or one of such values."""
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, Mapping):
        return all(is_blank(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(is_blank(item) for item in value)
    return value is None


def template_names(source: str) -> frozenset[str]:
    """Return what a chat template reads: `messages.KEY` for attributes, `chat_template_kwargs.NAME` for variables."""
    keys = {f"messages.{name}" for match in ANNOTATED.finditer(source) for name in match.groups() if name}
    return frozenset(keys | {f"chat_template_kwargs.{name}" for name in IDENTIFIER.findall(source)})


def carries_words(name: str, value: object, row: Mapping[str, Any], kind: str, used: Collection[str]) -> bool:
    """Return whether a column that is not read carries words of the conversation, by its name or by its content.

    Args:
        used: Texts of the conversation as it is read; a column that repeats one of them adds nothing.
    """
    if kind == TEXT:  # the text is the whole document
        return False
    if kind == PROMPTS and name in RESPONSES:  # the student writes its own
        return False
    if name in WEIGHTS:
        return value not in (1, True)
    if name == "text" or (any(name in pair and set(pair) <= row.keys() for pair in PAIR_COLUMNS) and kind == CHAT):
        return False  # the same row in another layout, which the order of the page *Data formats* leaves out
    if isinstance(value, str) and any(value.strip() in text for text in used):
        return False
    if name in WORDS:
        return kind != CHAT or name not in QUESTIONS
    is_other = name in CHAT_COLUMNS or name == "chosen" or bool(REJECTED.fullmatch(name.lower()))
    return not is_other and is_conversation(value)


def is_conversation(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, Mapping) and ({"role", "content"} <= item.keys() or "from" in item) for item in value)
    )


def advice(name: str, kind: str) -> str:
    """Return what to do about a column that carries words and is not read."""
    if name in WEIGHTS:
        return "weights of rows are not supported"
    if name in MEDIA:
        return "only text is trained on"
    if name in ("system", "system_prompt", "history", "tools", "functions", *REASONING, *REASONING_ALIASES):
        if kind == CHAT:
            return "write it into the messages"
        field = {"system_prompt": "system", "functions": "tools"}.get(name, name)
        field = "reasoning" if field in (*REASONING, *REASONING_ALIASES) else field
        mapped = "write it into a column messages" if field == "history" else f"data.fields.{field}={name} reads it"
        return f"{mapped} where there is a chat template"
    if kind == CHAT:
        return "write it into the messages"
    return f"data.fields.context={name} reads it before the prompt, data.fields.input={name} after it"
