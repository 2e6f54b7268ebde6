"""Environments: rollouts of several turns, in which a user's function replies to what the student says.

    data: {on_policy: {environment: calculator.py:step, max_turns: 4}}

After each answer the function is called as function(messages, tools, row) with the conversation so far. It returns the
next message, such as a tool's result, or several; the student then answers again. None ends the rollout, as do
`max_turns`, an answer that was cut off, and a reply for which there is no room. Only the student's own tokens are
trained on; those of a reply, with what the chat template writes around it, are input.

What a function said is written to the run's folder, and read again when the run resumes, so that a resumed run has the
same conversations whatever the function depends on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from distill.data.chat import ChatTemplate
from distill.data.sources import RowFault
from distill.generation.documents import Document
from distill.generation.function_calls import Call, Question, UserFunction

FIELD = "data.on_policy.environment"
ANSWER, REPLY = "zqanswerqz", "zqreplyqz"  # in place of texts, to find them in what the template writes
FOLDER = "environment"  # in a run's folder: what the environment said
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

    document: Document
    seed: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    replies: list[tuple[int, int]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    last: int = 0
    truncated: bool = False

    @property
    def turn(self) -> int:
        """Number of replies so far."""
        return len(self.replies)

    @property
    def prompt(self) -> list[int]:
        """Tokens after which the next response is generated."""
        return [*self.document.prompt, *self.tokens]

    @property
    def turn_seed(self) -> int:
        """Seed of the next response."""
        return self.seed if self.turn == 0 else _number(self.seed, self.turn)

    def say(self, tokens: Sequence[int], log_probs: Sequence[float], truncated: bool) -> None:
        """Append a response of the student."""
        self.last, self.truncated = len(self.tokens), truncated
        self.tokens += tokens
        self.log_probs += log_probs

    def hear(self, tokens: Sequence[int], messages: Sequence[Message], said: str) -> None:
        """Append a reply; `said` is the text of the response before it."""
        start = len(self.tokens)
        self.replies.append((start, start + len(tokens)))
        self.tokens += tokens
        if self.log_probs:
            self.log_probs += [float("nan")] * len(tokens)
        self.messages += [{"role": "assistant", "content": said}, *messages]


class ChatFormat(NamedTuple):
    """The chat format of rollouts.

    Attributes:
        template: chat template of the data.
        tokenizer: tokenizer of the data.
        ends: tokens at which generation stops.
    """

    template: ChatTemplate
    tokenizer: Any
    ends: frozenset[int]


class EnvironmentFunction(UserFunction):
    """The user's function: called as function(messages, tools, row), it returns messages or None."""

    field, limit, returns = FIELD, "data.on_policy.environment_timeout", "messages"


class Environment:
    """Replies to the responses of rollouts.

    Args:
        function: the user's function.
        question: looks up the data's row of a document, as rewards do.
        chat: chat format of the data.
        max_turns: maximum number of responses in a rollout.
        log: what was said before, and where it is written.
    """

    def __init__(
        self,
        function: UserFunction,
        question: Callable[[Document, Sequence[int]], Question],
        chat: ChatFormat,
        max_turns: int,
        log: EnvironmentLog,
    ) -> None:
        self.function, self.question, self.chat = function, question, chat
        self.max_turns, self.log = max_turns, log
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
        asked = [rollout for rollout in rollouts if not rollout.truncated and rollout.turn + 1 < self.max_turns]
        questions = [self.question(rollout.document, ()) for rollout in asked]
        said = [self._text_of(rollout) for rollout in asked]
        conversations = [
            self._conversation(question, [*rollout.messages, {"role": "assistant", "content": text}])
            for question, rollout, text in zip(questions, asked, said, strict=True)
        ]
        keys = [
            _digest(rollout.seed, rollout.turn, conversation)
            for rollout, conversation in zip(asked, conversations, strict=True)
        ]
        new = [number for number, key in enumerate(keys) if key not in self.log]
        calls = [Call(questions[n].place, [conversations[n], questions[n].tools, questions[n].row]) for n in new]
        self.log.add({keys[n]: reply for n, reply in zip(new, self.function.call(calls), strict=True)})
        going = []
        for rollout, question, conversation, text, key in zip(asked, questions, conversations, said, keys, strict=True):
            if (messages := self.log[key]) is None:
                continue
            tokens = self._tokens_of(rollout, conversation, messages, question)
            if tokens is not None and len(tokens) < room(rollout):
                rollout.hear(tokens, messages, text)
                going.append(rollout)
        return going

    def _conversation(self, question: Question, more: Sequence[Message]) -> list[Message]:
        if not isinstance(question.prompt, list):
            raise ValueError(f"{FIELD}: needs chats; {question.place} is a prompt with a completion")
        return [*question.prompt, *more]

    def _text_of(self, rollout: Rollout) -> str:
        """Return the last response as text, with special tokens such as those around a tool call, without its end."""
        tokens = rollout.tokens[rollout.last :]
        if tokens and tokens[-1] in self.chat.ends:
            tokens = tokens[:-1]
        return str(self.chat.tokenizer.decode(tokens, skip_special_tokens=False))

    def _tokens_of(
        self, rollout: Rollout, conversation: Sequence[Message], messages: Sequence[Message], question: Question
    ) -> list[int] | None:
        """Return what follows the last response up to the next one, as tokens.

        None where the response ended with another token than the one with which the template ends it here.
        """
        before, called = conversation[:-1], self.function.called(question.place)
        roles = tuple(str(message["role"]) for message in messages)
        if roles not in self._rendered:
            marked = [{**message, "content": f"{REPLY}{number}"} for number, message in enumerate(messages)]
            text = self._after_answer(before, marked, question.tools, called)
            if lost := [role for number, role in enumerate(roles) if f"{REPLY}{number}" not in text]:
                raise ValueError(
                    f"{called}: the chat template does not render a message of the role {lost[0]} after an answer; "
                    "return one of another role, such as user"
                )
            self._rendered.add(roles)
        after = self._after_answer(before, messages, question.tools, called)
        end = rollout.tokens[-1]
        if end not in self.chat.ends:  # a stop string ended it; the template ends the turn
            return self._ids_of(after)
        ids = self._ids_of(after.lstrip())
        closing = ids.index(end) + 1 if end in ids else 0
        closes = closing > 0 and all(token in self.special for token in ids[:closing])
        return ids[closing:] if closes else None

    def _after_answer(
        self, before: Sequence[Message], messages: Sequence[Message], tools: list[object] | None, called: str
    ) -> str:
        """Return what the template writes after an answer, with the generation prompt of the next one.

        The text of the answer is not rendered again: some templates change what was said before.
        """
        try:
            answer = {"role": "assistant", "content": ANSWER}
            text = self.chat.template.render([*before, answer, *messages], tools, prompt=True)
        except RowFault as fault:
            raise ValueError(f"{called}: {fault}") from None
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
        self._said: dict[str, list[Message] | None] = {}
        if self._file is not None and self._file.is_file() and not self._file.read_bytes().endswith(b"\n"):
            with self._file.open("a", encoding="utf-8") as own:  # a killed process left a line without its end
                own.write("\n")
        for file in [] if folder is None else sorted((folder / FOLDER).glob("*.jsonl")):
            self._said.update(_read(file))

    def __contains__(self, key: str) -> bool:
        """Return whether the environment has replied to this conversation."""
        return key in self._said

    def __getitem__(self, key: str) -> list[Message] | None:
        """Return its reply; None where it ended the rollout."""
        return self._said[key]

    def add(self, said: Mapping[str, list[Message] | None]) -> None:
        """Remember replies, and write them before they are used."""
        self._said.update(said)
        if self._file is not None and said:
            self._file.parent.mkdir(exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps({"key": key, "messages": reply}) + "\n" for key, reply in said.items())


def _read(file: Path) -> Iterator[tuple[str, list[Message] | None]]:
    """Yield the replies in a file; the last line that a killed process wrote may be incomplete."""
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        yield row["key"], row["messages"]


def _digest(seed: int, turn: int, conversation: Sequence[Message]) -> str:
    text = json.dumps([seed, turn, conversation], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _number(seed: int, turn: int) -> int:
    digest = hashlib.blake2b(f"{seed},{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
