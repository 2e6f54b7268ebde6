"""Chats rendered by any chat template: training examples of a conversation, and the loss of content in rendering.

`ChatTemplate` combines the parts: `messages` converts a conversation to the template's layout, `turns` finds the
assistant's text, `coverage` checks that no content is missing, and `rendering` limits time and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from distill.data.assistant_turns import RenderedChat, Turns
from distill.data.known_columns import TRAINED
from distill.data.messages import Adapter, content_of, is_trained, untrained_ranges, without_reasoning
from distill.data.rendering import FROZEN_DAY, Message, Renderer, Span, TemplateError, Tools, freeze_date
from distill.data.rows import RowFault
from distill.data.trained_parts import without_untrained

if TYPE_CHECKING:
    from distill.data.template_coverage import Omission

__all__ = [
    "FROZEN_DAY",
    "ChatOptions",
    "ChatTemplate",
    "Message",
    "RenderedChat",
    "Span",
    "TemplateError",
    "Tools",
    "TrainingChat",
    "freeze_date",
    "load_template",
    "with_template",
]

TrainOn = Literal["all", "each", "last"]


class ChatOptions(NamedTuple):
    """Settings of `data` that turn conversations into examples."""

    train_on: TrainOn = "all"
    reasoning: Literal["keep", "require", "drop"] = "keep"
    empty_answers: Literal["drop", "keep"] = "drop"

    @classmethod
    def of(cls, data: Any) -> ChatOptions:
        """Those of a recipe's `data`."""
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
    """Chat template bound to a tokenizer.

    Attributes:
        name: Name for error messages.
        adapter: Converts messages to the layout that the template renders completely.
    """

    def __init__(self, source: str, tokenizer: Any, name: str = "this chat template") -> None:
        """Bind a template.

        Raises:
            TemplateError: The text is not valid Jinja, or writes a date that cannot be frozen.
        """
        super().__init__(source, tokenizer)
        self.name = name
        self.adapter = Adapter(self)
        self._turns = Turns(self, self.adapter)
        self._probed: dict[tuple[object, ...], Omission | None] = {}

    def settings(self) -> list[object]:
        """Return everything that affects rendering, turn ends and row counts, as plain JSON."""
        return [self.source, sorted(self.stops), self.name, TRAINED]

    def closings(self) -> set[str]:
        """Return the special tokens that end an assistant's turn, plain or with tool calls."""
        with self.bounded():
            return self._turns.closings()

    def render(self, messages: Sequence[Message], tools: Tools = None, *, prompt: bool = False) -> str:
        """Return the template's text for `messages`, unchecked.

        Args:
            messages: Dictionaries with `role`, `content` and other keys that the template reads.
            tools: JSON schemas of the available tools.
            prompt: Append the generation prompt.

        Raises:
            RowFault: The template refuses these messages.
        """
        with self.bounded(messages):
            return self.raw(self.adapter(messages), tools, prompt=prompt).text

    def prompt(self, messages: Sequence[Message], tools: Tools = None) -> str:
        """Return the text after which the assistant's next turn is generated.

        Raises:
            RowFault: The template refuses these messages, or omits content of them.
        """
        answered = [*messages, {"role": "assistant", "content": "zqanswerqz"}]
        with self.bounded(messages):
            self.for_training(answered, tools, ChatOptions("last"))
            return self.raw(self.adapter(messages), tools, prompt=True).text

    def for_training(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        options: ChatOptions = ChatOptions(),  # noqa: B008
        *,
        first_trained: int = 0,
        fits: Callable[[str], bool] | None = None,
    ) -> TrainingChat:
        """Return the training examples of a conversation, checked to contain all of its content.

        Args:
            messages: Any number of turns, with or without a system prompt and tool turns.
            tools: JSON schemas of the available tools.
            options: Turns to train on, of those that their messages do not exclude; `all` becomes `each` where the
                template rewrites earlier turns.
            first_trained: Index of the first message to train on; those before it are the prompt.
            fits: Function that returns whether a prompt is short enough; turns with longer prompts may be left out.

        Raises:
            RowFault: There is no assistant turn, an empty one, the template refuses these messages or omits content of
                them, or the assistant's text cannot be located in its output.
        """
        from distill.data import template_coverage

        roles = [message.get("role") for message in messages]
        turns = [turn for turn, role in enumerate(roles) if role == "assistant" and turn >= first_trained]
        if not turns:
            raise RowFault("no assistant turn", f"roles: {', '.join(map(str, roles[:8]))}")
        turns = [turn for turn in turns if is_trained(messages[turn])]
        if not turns:
            raise RowFault("no assistant turn is trained on", f"each has a {' or '.join(TRAINED)} of 0 or false")
        turns = turns[-1:] if options.train_on == "last" else turns
        with self.bounded(messages):
            if options.reasoning == "drop":
                messages = [without_reasoning(message) for message in messages]
            made = self._examples(messages, tools, turns, options.train_on == "each", fits)
            if not made.examples:
                return made
            losses = self._losses(messages, tools, turns) or template_coverage.Omission()
            if losses.fault is not None:
                raise RowFault(
                    template_coverage.omission_fault(losses.fault, self.name), self._example_of(messages, turns)
                )
            taken = [turn for example in made.examples for turn in example.turns]
            thoughts = (
                template_coverage.check_words(made.examples, messages, tools, taken, self.name) and not losses.thought
            )
        named = losses.named
        if not thoughts:
            if options.reasoning == "require":
                raise RowFault(
                    template_coverage.omission_fault(template_coverage.THOUGHT, self.name),
                    self._example_of(messages, turns),
                )
            named = (template_coverage.THOUGHT, *named)
        if options.empty_answers == "drop" and any(
            template_coverage.is_empty(content_of(messages[turn]), thoughts) for turn in taken
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

    def _losses(self, messages: Sequence[Message], tools: Tools, turns: list[int]) -> Omission | None:
        """Return the content that the template omits from conversations of this shape; None where it refuses them."""
        from distill.data import template_coverage

        shape, kept = template_coverage.chat_shape(messages[: turns[-1] + 1], tools, turns)
        if not kept:
            return None
        if shape not in self._probed:
            places = {number: place for place, number in enumerate(kept)}
            learned = [places[turn] for turn in turns if turn in places]

            def rendered(filled: Sequence[Message], offered: Tools, chosen: list[int]) -> list[RenderedChat]:
                return self._examples(filled, offered, chosen, each=False).examples

            self._probed[shape] = template_coverage.find_omission(rendered, [messages[n] for n in kept], tools, learned)
        return self._probed[shape]

    def _example_of(self, messages: Sequence[Message], turns: Sequence[int]) -> str:
        roles = ", ".join(str(message.get("role")) for message in messages[:8])
        return f"message {turns[0]} of roles {roles}"


def load_template(choice: str, tokenizer: Any, name: str = "this chat template") -> ChatTemplate | None:
    """Return the template that a recipe's `data.chat_template` names: `tokenizer`, `none`, or a .jinja file.

    Args:
        name: Name of a tokenizer's template in error messages; a file's template is named by its file.

    Returns:
        None where the tokenizer has no template, or for `none`.

    Raises:
        ValueError: The file does not exist or is not a template.
    """
    if choice == "none":
        return None
    if choice == "tokenizer":
        source = getattr(tokenizer, "chat_template", None)
        if isinstance(source, dict):  # named templates
            source = source.get("default")
        return ChatTemplate(source, tokenizer, name) if source else None
    return ChatTemplate(_file(choice), tokenizer, f"the chat template {Path(choice).name}")


def with_template(tokenizer: Any, choice: str) -> Any:
    """Return the tokenizer with the chat template of a recipe's `data.chat_template`, if that is a file.

    Raises:
        ValueError: The file does not exist.
    """
    if choice not in ("tokenizer", "none"):
        tokenizer.chat_template = _file(choice)
    return tokenizer


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
