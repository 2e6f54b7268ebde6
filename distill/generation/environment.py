"""Environments: rollouts of several turns, in which a user's function replies to the student's responses.

    data: {on_policy: {environment: calculator.py:step, max_turns: 4}}

After each response the function is called as function(messages, tools, row) with the conversation so far. It returns
the next message, such as a tool's result, or several; the student then generates again. None ends the rollout, as do
`max_turns`, a response that was cut off, and a reply for which there is no room. Only the student's own tokens are
trained on; those of a reply, with what the chat template writes around it, are input.

Replies of the function are written to the run's folder, and read again when the run resumes, so that a resumed run has
the same conversations whatever the function depends on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from distill.core.manifest import SUM, has_valid_checksum, with_checksum
from distill.data.chat import ChatTemplate
from distill.data.known_columns import TEMPLATE_KWARGS
from distill.data.row_reader import template_kwargs
from distill.data.rows import RowFault
from distill.generation.documents import RolloutDocument
from distill.generation.function_calls import Call, FunctionInput, UserFunction
from distill.generation.sampling import derived_seed
from distill.generation.stopping import response_text

log = logging.getLogger(__name__)

FIELD = "data.on_policy.environment"
# in place of texts, to find them in what the template writes
ANSWER = "zqanswerqz"
REPLY = "zqreplyqz"
FOLDER = "environment"  # in a run's folder: replies of the environment
Message = dict[str, object]


@dataclass
class Rollout:
    """One rollout while it is generated.

    Attributes:
        document: document of the data whose last response it replaces.
        seed: determines its sampled tokens.
        tokens: tokens after the prompt: responses of the student and replies of the environment.
        log_probs: log-probability of each of them when it was sampled, NaN for replies; empty where they are not kept.
        replies: (start, stop) in `tokens` of each reply.
        messages: the messages after the data's prompt and before the last response.
        last: index in `tokens` of the last response.
        truncated: whether that was cut off.
    """

    document: RolloutDocument
    seed: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    replies: list[tuple[int, int]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    last: int = 0
    truncated: bool = False

    @property
    def turn(self) -> int:
        return len(self.replies)

    @property
    def prompt(self) -> list[int]:
        return [*self.document.prompt, *self.tokens]

    @property
    def turn_seed(self) -> int:
        return self.seed if self.turn == 0 else derived_seed(self.seed, self.turn)

    def add_response(self, tokens: Sequence[int], log_probs: Sequence[float], truncated: bool) -> None:
        self.last = len(self.tokens)
        self.truncated = truncated
        self.tokens += tokens
        self.log_probs += log_probs

    def add_reply(self, tokens: Sequence[int], messages: Sequence[Message], response: str) -> None:
        """Append a reply; `response` is the text of the response before it."""
        start = len(self.tokens)
        self.replies.append((start, start + len(tokens)))
        self.tokens += tokens
        if self.log_probs:
            self.log_probs += [float("nan")] * len(tokens)
        self.messages += [{"role": "assistant", "content": response}, *messages]


class ChatFormat(NamedTuple):
    """The chat format of rollouts.

    Attributes:
        ends: tokens at which generation stops.
    """

    template: ChatTemplate
    tokenizer: Any
    ends: frozenset[int]


class EnvironmentFunction(UserFunction):
    """The user's function, called as function(messages, tools, row), it returns messages or None."""

    field = FIELD
    limit = "data.on_policy.environment_timeout"
    returns = "messages"


class Environment:
    """Replies to the responses of rollouts.

    Args:
        function_input: looks up the data's row of a document, as rewards do.
        max_turns: maximum number of responses in a rollout.
        log: replies of earlier calls, which a resumed run reads again.
    """

    def __init__(
        self,
        function: UserFunction,
        function_input: Callable[[RolloutDocument, Sequence[int]], FunctionInput],
        chat: ChatFormat,
        max_turns: int,
        log: EnvironmentLog,
    ) -> None:
        self.function = function
        self.function_input = function_input
        self.chat = chat
        self.max_turns = max_turns
        self.log = log
        self._rendered: set[tuple[str, ...]] = set()  # roles of replies that were found in the template's text
        self.special = {number for number, token in chat.tokenizer.added_tokens_decoder.items() if token.special}

    def reply(self, rollouts: Sequence[Rollout], room: Callable[[Rollout], int]) -> list[Rollout]:
        """Append the environment's replies; return the rollouts that go on.

        Args:
            rollouts: each with a response at its end.
            room: number of tokens that a rollout may still have; the next response needs one.

        Raises:
            ValueError: the function failed, or the chat template refuses what it returned.
        """
        waiting = [rollout for rollout in rollouts if not rollout.truncated and rollout.turn + 1 < self.max_turns]
        inputs = [self.function_input(rollout.document, ()) for rollout in waiting]
        texts = [
            response_text(self.chat.tokenizer, rollout.tokens[rollout.last :], self.chat.ends) for rollout in waiting
        ]
        conversations = [
            self._conversation(function_input, [*rollout.messages, {"role": "assistant", "content": text}])
            for function_input, rollout, text in zip(inputs, waiting, texts, strict=True)
        ]
        keys = [
            _conversation_key(rollout, conversation)
            for rollout, conversation in zip(waiting, conversations, strict=True)
        ]
        # A resumed run comes to conversations that are in the log: the function is called for new ones alone. Replies
        # are logged before any is used.
        new = [number for number, key in enumerate(keys) if key not in self.log]
        calls = [Call(inputs[n].location, [conversations[n], inputs[n].tools, inputs[n].row]) for n in new]
        replies = self.function.call(calls)
        for n, reply in zip(new, replies, strict=True):
            _require_unicode(reply, self.function.error_prefix(inputs[n].location))
        self.log.add({keys[n]: reply for n, reply in zip(new, replies, strict=True)})
        continuing = []
        for rollout, function_input, conversation, text, key in zip(
            waiting, inputs, conversations, texts, keys, strict=True
        ):
            messages = self.log[key]
            if messages is None:
                continue
            tokens = self._tokens_of(rollout, conversation, messages, function_input)
            if tokens is not None and len(tokens) < room(rollout):
                rollout.add_reply(tokens, messages, text)
                continuing.append(rollout)
        return continuing

    def _conversation(self, function_input: FunctionInput, more: Sequence[Message]) -> list[Message]:
        if not isinstance(function_input.prompt, list):
            raise ValueError(f"{FIELD}: needs chats; {function_input.location} is a prompt with a completion")
        return [*function_input.prompt, *more]

    def _tokens_of(
        self,
        rollout: Rollout,
        conversation: Sequence[Message],
        messages: Sequence[Message],
        function_input: FunctionInput,
    ) -> list[int] | None:
        """Return what follows the last response up to the next one, as tokens.

        None where the response ended with another token than the one with which the template ends it here.
        """
        before = conversation[:-1]
        prefix = self.function.error_prefix(function_input.location)
        roles = tuple(str(message["role"]) for message in messages)
        # Templates leave out messages of roles that they do not know, without an error. A marker in place of each text
        # shows, once for these roles in this order, that all are written.
        if roles not in self._rendered:
            marked = [{**message, "content": f"{REPLY}{number}"} for number, message in enumerate(messages)]
            text = self._text_after_response(before, marked, function_input, prefix)
            lost = [role for number, role in enumerate(roles) if f"{REPLY}{number}" not in text]
            if lost:
                raise ValueError(
                    f"{prefix}: the chat template does not render a message of the role {lost[0]} after an answer; "
                    "return one of another role, such as user"
                )
            self._rendered.add(roles)
        after = self._text_after_response(before, messages, function_input, prefix)
        end = rollout.tokens[-1]
        if end not in self.chat.ends:  # a stop string ended it; the template ends the turn
            return self._ids_of(after)
        # The end token is in the rollout already, so what the template writes up to it is dropped. Where other text
        # than special tokens stands before it, the template ends this response in another way.
        ids = self._ids_of(after.lstrip())
        closing = ids.index(end) + 1 if end in ids else 0
        closes = closing > 0 and all(token in self.special for token in ids[:closing])
        return ids[closing:] if closes else None

    def _text_after_response(
        self, before: Sequence[Message], messages: Sequence[Message], function_input: FunctionInput, prefix: str
    ) -> str:
        """Return what the template writes after a response, with the generation prompt of the next one.

        The text of the response is not rendered again: some templates change earlier messages.
        """
        try:
            answer = {"role": "assistant", "content": ANSWER}
            text = self.chat.template.render(
                [*before, answer, *messages],
                function_input.tools,
                prompt=True,
                kwargs=template_kwargs(function_input.row.get(TEMPLATE_KWARGS)),
            )
        except RowFault as fault:
            raise ValueError(f"{prefix}: {fault}") from None
        return text[text.rfind(ANSWER) + len(ANSWER) :] if ANSWER in text else ""

    def _ids_of(self, text: str) -> list[int]:
        ids: list[int] = self.chat.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids


class EnvironmentLog:
    """Log of an environment's replies, by the conversation before each.

    Args:
        folder: the run's folder; None to keep it in memory alone.
        rank: number of this process, which writes a file of its own; all files are read.
    """

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._file = None if folder is None else folder / FOLDER / f"{rank:05d}.jsonl"
        self._replies: dict[str, list[Message] | None] = {}
        if self._file is not None and self._file.is_file():
            _cut_unfinished_line(self._file)
        for file in [] if folder is None else sorted((folder / FOLDER).glob("*.jsonl")):
            replies, damaged = read_replies(file)
            self._replies.update(replies)
            if damaged:
                log.warning(
                    "%s: line %s is damaged: its reply is not used, and the environment is called again",
                    file,
                    ", ".join(map(str, damaged)),
                )

    def __contains__(self, key: str) -> bool:
        return key in self._replies

    def __getitem__(self, key: str) -> list[Message] | None:
        """Return its reply; None where it ended the rollout."""
        return self._replies[key]

    def add(self, replies: Mapping[str, list[Message] | None]) -> None:
        """Remember replies, and write them before they are used."""
        self._replies.update(replies)
        if self._file is not None and replies:
            self._file.parent.mkdir(exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                for key, reply in replies.items():
                    file.write(json.dumps(with_checksum({"key": key, "messages": reply})) + "\n")


def _require_unicode(messages: Sequence[Message] | None, prefix: str) -> None:
    """Raise for a lone surrogate, half of a character in UTF-16, which no tokenizer reads and no file holds."""
    for message in messages or ():
        text = str(message["content"])
        lone = next((index for index, letter in enumerate(text) if 0xD800 <= ord(letter) <= 0xDFFF), None)
        if lone is not None:
            raise ValueError(
                f"{prefix}: expected text in Unicode, got the lone surrogate {text[lone]!a} at character {lone}"
            )


def read_replies(file: Path) -> tuple[dict[str, list[Message] | None], list[int]]:
    """Return the replies in a file by the conversation before each, and the numbers, from 1, of damaged lines.

    A last line without its end, which a killed process wrote, is left out.
    """
    replies: dict[str, list[Message] | None] = {}
    damaged: list[int] = []
    *lines, _ = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            # a damaged name of the checksum must not pass for a line of before there were checksums
            if not isinstance(row, dict) or row.keys() - {SUM} != {"key", "messages"} or not has_valid_checksum(row):
                raise ValueError("it is not as it was written")
        except (ValueError, RecursionError):
            damaged.append(number)
        else:
            replies[row["key"]] = row["messages"]
    return replies, damaged


def _cut_unfinished_line(file: Path) -> None:
    """Cut off the line that a killed process did not finish."""
    content = file.read_bytes()
    if not content.endswith(b"\n"):
        os.truncate(file, content.rfind(b"\n") + 1)


def _conversation_key(rollout: Rollout, conversation: Sequence[Message]) -> str:
    # rows of the same words may have other columns, which the environment reads too
    text = json.dumps([rollout.seed, rollout.turn, conversation, rollout.document.source_row], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
