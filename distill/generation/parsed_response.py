"""A sampled answer as a message of a chat, where that leads back to the tokens that were sampled.

Another tokenizer reads an answer as text, so the text has to say all that the tokens said. Tried in this order:

1. what the tokenizer's own response template (`parse_response` of transformers) takes the answer for: content,
   reasoning and tool calls, which the chat template must render to the same ids;
2. reasoning before `</think>`, opened by the answer or by the prompt (R1's): between the tags and the answer stands
   nothing but line ends, and the text must be tokenised to the same ids;
3. the text as it is, if no token of it is special and no reasoning is open in it.

An answer for which none of them does has no text that another tokenizer could read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from distill.data.chat import ChatTemplate
from distill.data.known_columns import REASONING
from distill.data.messages import THOUGHT, content_of
from distill.data.rows import RowFault
from distill.generation.prompts import RolloutPrompt

OPEN = "<think>"
CLOSE = "</think>"


class ParsedResponse(NamedTuple):
    """A sampled answer, as far as text can hold it.

    Attributes:
        message: The answer in parts; None where its text is all of it.
        same_text: Whether the message, or else the text, leads back to the sampled tokens.
    """

    message: dict[str, Any] | None
    same_text: bool


class ResponseParser:
    """Parser of answers to prompts.

    Args:
        tokenizer: Tokenizer of the model that generates.
        template: Chat template; None to continue prompts as text.
    """

    def __init__(self, tokenizer: Any, template: ChatTemplate | None) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}

    def parse(self, prompt: RolloutPrompt, tokens: Sequence[int], text: str, *, ended: bool) -> ParsedResponse:
        """Return an answer as a message.

        Args:
            tokens: Its tokens, with the one that ended it, if one did.
            text: Its text without that one (`response_text`).
            ended: Whether its last token is one that ends an answer.
        """
        body = list(tokens[:-1] if ended else tokens)
        if self.template is None:
            return ParsedResponse(None, self._spells(prompt, body, text))
        message = self._by_response_template(prompt, tokens, ended)
        if message is not None:
            return ParsedResponse(message, True)
        is_open = prompt.text.rstrip().endswith(OPEN)
        thought = THOUGHT.match(f"{OPEN}{text}" if is_open else text)
        plain = self.special.isdisjoint(body) and self._spells(prompt, body, text)
        if thought is not None and thought["answer"].strip():
            message = {
                "role": "assistant",
                "content": thought["answer"].lstrip("\n"),
                REASONING[0]: thought["thought"].strip("\n"),
            }
            return ParsedResponse(message, plain)
        return ParsedResponse(None, plain and not is_open and OPEN not in text and CLOSE not in text)

    def _spells(self, prompt: RolloutPrompt, body: list[int], text: str) -> bool:
        """Return whether the prompt's text and the answer's are tokenised to the ids of both."""
        ids = self._ids(prompt.text + text)
        whole = [*prompt.ids, *body]
        return ids == whole or prompt.ids[:1] + ids == whole  # the token that begins a text

    def _by_response_template(self, prompt: RolloutPrompt, tokens: Sequence[int], ended: bool) -> dict[str, Any] | None:
        """Return what the tokenizer's response template takes an answer for, if it is rendered to the same ids."""
        if getattr(self.tokenizer, "response_template", None) is None:
            return None
        assert self.template is not None
        given = self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        tools = prompt.row.get("tools")
        try:
            message = self.tokenizer.parse_response(given, prefix=prompt.text, tools=tools)
            message = {"role": "assistant", "content": ""} | {name: value for name, value in message.items() if value}
            text = self.template.render([*prompt.messages, message], tools)
        except (RowFault, ValueError, KeyError, TypeError, AttributeError):  # an answer in another form
            return None
        parts = content_of(message)
        # what a cut-off answer ends with must be its content, whose end is known
        if not ended and (parts.calls or not parts.answer.strip()):
            return None
        whole = [*prompt.ids, *tokens]
        return message if self._ids(text)[: len(whole)] == whole else None

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids
