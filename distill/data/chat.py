"""Chats rendered by any chat template: training examples of a conversation, and the loss of content in rendering.

`ChatTemplate` combines the parts: `messages` converts a conversation to the template's layout, `turns` finds the
assistant's text, `template_coverage` checks that no content is missing, and `rendering` runs the template.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from distill.data import template_coverage
from distill.data.assistant_turns import RenderedChat, Turns
from distill.data.known_columns import TRAINED
from distill.data.messages import MessageAdapter, content_of, is_trained, untrained_ranges, without_reasoning
from distill.data.rendering import Message, Renderer, Tools
from distill.data.rows import RowFault
from distill.data.trained_parts import without_untrained

if TYPE_CHECKING:
    from distill.recipe import Data

TrainOn = Literal["all", "each", "last"]
TOOL_USE = "tool_use"  # the named template that transformers takes for conversations with tools
MOST_VARIANTS = 64  # keyword arguments of rows whose templates are kept, with what was found out about them
RENDERED = {"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"}  # not a setting
SAVED_KWARGS = "chat_template_kwargs"  # key of a saved tokenizer's tokenizer_config.json


class ChatOptions(NamedTuple):
    """Settings of `data` that turn conversations into examples."""

    train_on: TrainOn = "all"
    reasoning: Literal["keep", "require", "drop"] = "keep"
    empty_answers: Literal["drop", "keep"] = "drop"

    @classmethod
    def of(cls, data: Any) -> ChatOptions:
        return cls("each" if data.generates_every_turn else data.train_on, data.reasoning, data.empty_answers)


class TrainingChat(NamedTuple):
    """Training examples of one conversation.

    Attributes:
        examples: Examples in the order of their turns: one for all turns, or one per turn.
        rewritten: There is one per turn because the template renders earlier turns differently from last ones.
        left_out: Number of turns whose prompts are too long.
        named: Fields that the template does not render; the row is trained on without them.
    """

    examples: list[RenderedChat]
    rewritten: bool = False
    left_out: int = 0
    named: tuple[str, ...] = ()


class ChatTemplate(Renderer):
    """Chat template bound to a tokenizer and to keyword arguments.

    A conversation is rendered by a variant of it: with the row's own keyword arguments, and with tools by the
    tokenizer's template `tool_use`, if it has one. What is found out about a template (its layout of messages, its
    closing tokens) is found out for each variant.

    Attributes:
        adapter: Converts messages to the layout that the template renders completely.
        tool_use: Template of conversations with tools; None where it is this one.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Any,
        name: str = "this chat template",
        *,
        kwargs: Mapping[str, Any] | None = None,
        tool_use: str | None = None,
    ) -> None:
        """Bind a template.

        Args:
            tokenizer: Tokenizer whose special tokens it writes.
            kwargs: Variables that the template reads beside messages and tools.
            tool_use: Text of the template of conversations with tools; None for the same.

        Raises:
            TemplateError: The text is not valid Jinja, or writes a date that cannot be frozen.
        """
        super().__init__(source, tokenizer, kwargs)
        self.name = name
        self.tool_use = None if tool_use is None else ChatTemplate(tool_use, tokenizer, name, kwargs=kwargs)
        self._variants: dict[str, ChatTemplate] = {}
        self._begin()

    def _begin(self) -> None:
        """Forget what was found out about the template."""
        self.adapter = MessageAdapter(self)
        self._turns = Turns(self, self.adapter)

    def variant(self, tools: Tools, kwargs: Mapping[str, Any] | None = None) -> ChatTemplate:
        """Return the template that renders a conversation.

        Args:
            kwargs: The row's own keyword arguments, which take precedence over the template's.
        """
        if tools and self.tool_use is not None:
            return self.tool_use.variant(tools, kwargs)
        both = {**self.kwargs, **(kwargs or {})}
        return self if both == self.kwargs else self._with(both)

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> ChatTemplate:
        if dict(kwargs) == self.kwargs:
            return self
        made = self._with(dict(kwargs))
        if self.tool_use is not None:
            made = copy.copy(made)  # `_with` keeps its own, which has no template for tools
            made.tool_use = self.tool_use.with_kwargs(kwargs)
            made._variants = {}
            made._begin()
        return made

    def _with(self, kwargs: dict[str, Any]) -> ChatTemplate:
        key = json.dumps(kwargs, sort_keys=True)
        if key not in self._variants:
            if len(self._variants) >= MOST_VARIANTS:  # rows with documents have one each
                del self._variants[next(iter(self._variants))]
            made = copy.copy(self)
            made.kwargs = kwargs
            made.tool_use = None
            made._variants = {}
            made._begin()
            self._variants[key] = made
        return self._variants[key]

    def unread(self, kwargs: Mapping[str, Any]) -> list[str]:
        """Return the names that the template, with tools or without, does not read."""
        reads = self.reads if self.tool_use is None else self.reads | self.tool_use.reads
        return [name for name in kwargs if name not in reads and name not in self.special_tokens]

    def settings(self) -> list[object]:
        """Return everything that affects rendering, turn ends and row counts, as plain JSON."""
        own: list[object] = [self.source, sorted(self.stops), self.name, TRAINED, self.kwargs]
        return own if self.tool_use is None else [*own, self.tool_use.source]

    @property
    def definition(self) -> str:
        """Return the template's text, followed by its keyword arguments and by `tool_use`, for hashes."""
        parts = [self.source]
        if self.kwargs:
            parts.append(json.dumps(self.kwargs, sort_keys=True))
        if self.tool_use is not None:
            parts.append(self.tool_use.source)
        return "\n".join(parts)

    def closings(self) -> set[str]:
        found = self._turns.closings()
        return found if self.tool_use is None else found | self.tool_use.closings()

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        *,
        prompt: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the template's text for `messages`, unchecked; arguments as in `raw`, `kwargs` are the row's own.

        Raises:
            RowFault: The template refuses these messages.
        """
        own = self.variant(tools, kwargs)
        return own.raw(own.adapter(messages), tools, prompt=prompt).text

    def prompt(self, messages: Sequence[Message], tools: Tools = None, kwargs: Mapping[str, Any] | None = None) -> str:
        """Return the text after which the assistant's next turn is generated; `kwargs` are the row's own.

        Raises:
            RowFault: The template refuses these messages, or omits content of them.
        """
        # rendered with a made-up answer: the check of a training example also covers its prompt
        answered = [*messages, {"role": "assistant", "content": "zqanswerqz"}]
        self.for_training(answered, tools, ChatOptions("last"), kwargs=kwargs)
        own = self.variant(tools, kwargs)
        return own.raw(own.adapter(messages), tools, prompt=True).text

    def for_training(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        options: ChatOptions = ChatOptions(),  # noqa: B008
        *,
        first_trained: int = 0,
        fits: Callable[[str], bool] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> TrainingChat:
        """Return the training examples of a conversation, checked to contain all of its content.

        Args:
            messages: Any number of turns, with or without a system prompt and tool turns.
            tools: JSON schemas of the available tools.
            options: Turns to train on, of those that their messages do not exclude; `all` becomes `each` where the
                template rewrites earlier turns.
            first_trained: Index of the first message to train on; those before it are the prompt.
            fits: Function that returns whether a prompt is short enough; turns with longer prompts may be left out.
            kwargs: The row's own keyword arguments of the template.

        Raises:
            RowFault: There is no assistant turn, an empty one, the template refuses these messages or omits content of
                them, or the assistant's text cannot be located in its output.
        """
        roles = [message.get("role") for message in messages]
        turns = [turn for turn, role in enumerate(roles) if role == "assistant" and turn >= first_trained]
        if not turns:
            raise RowFault("no assistant turn", f"roles: {', '.join(map(str, roles[:8]))}")
        turns = [turn for turn in turns if is_trained(messages[turn])]
        if not turns:
            raise RowFault("no assistant turn is trained on", f"each has a {' or '.join(TRAINED)} of 0 or false")
        turns = turns[-1:] if options.train_on == "last" else turns
        made = self.variant(tools, kwargs)._for_training(messages, tools, options, turns, fits)
        unread = self.variant(tools).unread(kwargs or {})
        if template_coverage.DOCUMENTS in unread:
            raise RowFault(template_coverage.omission_fault(template_coverage.DOCUMENTS, self.name))
        return made

    def _for_training(
        self,
        messages: Sequence[Message],
        tools: Tools,
        options: ChatOptions,
        turns: list[int],
        fits: Callable[[str], bool] | None,
    ) -> TrainingChat:
        if options.reasoning == "drop":
            messages = [without_reasoning(message) for message in messages]
        made = self._examples(messages, tools, turns, options.train_on == "each", fits)
        if not made.examples:
            return made
        taken = [turn for example in made.examples for turn in example.turns]
        coverage = template_coverage.check_words(made.examples, messages, tools, taken, self.name)
        template_coverage.check_documents(made.examples, self.kwargs, self.name)
        named = coverage.named
        if not coverage.thoughts:
            if options.reasoning == "require":
                raise RowFault(
                    template_coverage.omission_fault(template_coverage.THOUGHT, self.name),
                    self._example_of(messages, turns),
                )
            named = (template_coverage.THOUGHT, *named)
        if options.empty_answers == "drop" and any(
            template_coverage.is_empty(content_of(messages[turn]), coverage.thoughts) for turn in taken
        ):
            raise RowFault("empty", "an assistant message without content; data.empty_answers: keep trains on it")
        if any(untrained_ranges(messages[turn]) for turn in taken):
            made = made._replace(examples=[without_untrained(example, messages) for example in made.examples])
        return made._replace(named=named)

    def _examples(
        self,
        messages: Sequence[Message],
        tools: Tools,
        turns: list[int],
        each: bool,
        fits: Callable[[str], bool] | None = None,
    ) -> TrainingChat:
        adapted = self.adapter(messages)
        whole = None if each else self._turns.whole(adapted, tools, turns)
        if whole is not None:
            return TrainingChat([whole])
        examples = list(self._turns.each(adapted, tools, turns, fits if len(turns) > 1 else None))
        return TrainingChat(examples, not each and len(turns) > 1, len(turns) - len(examples))

    def _example_of(self, messages: Sequence[Message], turns: Sequence[int]) -> str:
        roles = ", ".join(str(message.get("role")) for message in messages[:8])
        return f"message {turns[0]} of roles {roles}"


def template_of(
    data: Data,
    tokenizer: Any,
    name: str = "this chat template",
    *,
    kwargs: Mapping[str, Any] | None = None,
    field: str = "data",
) -> ChatTemplate | None:
    """Return the chat template of a recipe's `data`, with its keyword arguments.

    Args:
        tokenizer: Tokenizer whose template, or with whose special tokens the file's, is used.
        name: Name of a tokenizer's template in error messages.
        kwargs: Keyword arguments in place of `data.chat_template_kwargs`, such as the teacher's.
        field: Section that gives the keyword arguments, for error messages.

    Returns:
        None where the tokenizer has no template, or for `none`.

    Raises:
        ValueError: The template cannot be read, or does not read one of the keyword arguments.
    """
    own = data.chat_template_kwargs if kwargs is None else kwargs
    template = load_template(data.chat_template, tokenizer, name, own)
    if template is None and own:
        raise ValueError(
            f"{field}.chat_template_kwargs: expected a chat template that reads {', '.join(own)}, got none; leave it "
            "out, or set data.chat_template"
        )
    unread = [] if template is None else template.unread(own)
    if template is not None and unread:
        known = ", ".join(sorted(template.reads - RENDERED)) or "none"
        raise ValueError(
            f"{field}.chat_template_kwargs: expected variables that {template.name} reads ({known}), got {unread[0]}"
        )
    return template


def load_template(
    choice: str, tokenizer: Any, name: str = "this chat template", kwargs: Mapping[str, Any] | None = None
) -> ChatTemplate | None:
    """Return the template that a recipe's `data.chat_template` names: `tokenizer`, `none`, or a .jinja file.

    Of a tokenizer with named templates those that transformers takes: `tool_use` with tools, else `default`; without
    one, conversations and pairs are refused, as there.

    Args:
        tokenizer: Tokenizer whose special tokens the template writes.
        name: Name of a tokenizer's template in error messages; a file's template is named by its file.
        kwargs: Variables that the template reads beside messages and tools.

    Returns:
        None where the tokenizer has no template, or for `none`.

    Raises:
        ValueError: The file does not exist or is not a template.
    """
    if choice == "none":
        return None
    if choice == "tokenizer":
        source = getattr(tokenizer, "chat_template", None)
        tool_use = None
        if isinstance(source, dict):  # named templates
            names = ", ".join(source)
            tool_use = source.get(TOOL_USE)
            refusal = f"the tokenizer has the chat templates {names}, and none called default; set data.chat_template"
            source = source.get("default") or f"{{{{ raise_exception({refusal!r}) }}}}"
        return ChatTemplate(source, tokenizer, name, kwargs=kwargs, tool_use=tool_use) if source else None
    return ChatTemplate(_file(choice), tokenizer, f"the chat template {Path(choice).name}", kwargs=kwargs)


def with_template(tokenizer: Any, data: Data) -> Any:
    """Return the tokenizer with the chat template of a recipe's `data`, if that is a file, and its keyword arguments.

    Both are saved with the tokenizer, so that a student generates after the prompts that it was trained on.
    """
    if data.chat_template not in ("tokenizer", "none"):
        tokenizer.chat_template = _file(data.chat_template)
    return with_template_kwargs(tokenizer, data.chat_template_kwargs)


def with_template_kwargs(tokenizer: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return a copy of a tokenizer that generates with these keyword arguments of its chat template."""
    made = copy.copy(tokenizer)
    others = {name: value for name, value in tokenizer.init_kwargs.items() if name != SAVED_KWARGS}
    made.init_kwargs = {**others, **({SAVED_KWARGS: dict(kwargs)} if kwargs else {})}
    return made


def template_kwargs_of(tokenizer: Any) -> dict[str, Any]:
    """Return the keyword arguments of the chat template that a tokenizer was saved with; empty where none were."""
    found = getattr(tokenizer, "init_kwargs", {}).get(SAVED_KWARGS)
    return dict(found) if isinstance(found, dict) else {}


def _file(choice: str) -> str:
    path = Path(choice).expanduser()
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is not a regular file")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"data.chat_template: expected tokenizer, none or a .jinja file; {choice!r} cannot be read: {error}"
        ) from error
