"""Contexts of a teacher that are made from the run: from other responses to the prompt, their rewards, feedback.

For each response of a group the template (`teacher.context.template`) reads the *others* of it, so that the teacher
never reads the response that it scores: those of the same text are left out too. `best` is the other one of the highest
reward that reaches `success`, `failed` the one of the lowest reward that does not, each the first of several. (Hübotter
et al., 2026, "Reinforcement learning via self-distillation", SDPO, arXiv 2601.20802: a successful attempt of the group
and the feedback on the student's own.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from distill.generation.documents import RolloutDocument, RolloutScore
from distill.generation.function_calls import FunctionInput
from distill.generation.rollout_steps import GeneratedResponse
from distill.recipe import Context
from distill.recipe.context_template import Response, render


class ContextRequest(NamedTuple):
    """A response whose teacher's prompt is wanted.

    Attributes:
        document: Document of the data that the response replaces.
        row: Row of the data that it is of.
        text: The context; empty for the teacher's prompt without one.
    """

    document: RolloutDocument
    row: dict[str, object]
    text: str


class ContextReader(Protocol):
    """Maker of a teacher's prompts."""

    def prompts(self, requests: Sequence[ContextRequest]) -> list[list[int] | None]:
        """Return the teacher's tokens before each response; None where the row cannot have this context."""
        ...


class RunContext(NamedTuple):
    """The context of a route's teachers.

    Attributes:
        section: Its settings.
        room: Tokens by which a prompt may be longer than for the row alone.
        reader: Makes the teachers' prompts.
    """

    section: Context
    room: int
    reader: ContextReader


class PromptTokens(NamedTuple):
    """The teacher's tokens before a response.

    Attributes:
        ids: None where the response is left out of training.
        has_context: Whether they hold a context.
    """

    ids: list[int] | None
    has_context: bool


@dataclass
class RolloutContexts:
    """The teacher's prompts of a step's responses.

    Attributes:
        by_route: Contexts by the number of the route; None for the only teacher.
        function_input: Looks up the data's row of a document, as rewards do.
        max_length: Maximum number of tokens of a prompt with its response.
    """

    by_route: Mapping[int | None, RunContext]
    function_input: Callable[[RolloutDocument, Sequence[int]], FunctionInput]
    max_length: int

    def room(self, document: RolloutDocument) -> int:
        """Return the number of tokens by which the teacher's prompt of a response may be longer than the document's."""
        own = self.by_route.get(document.route)
        return 0 if own is None else own.room

    def prompts(
        self,
        documents: Sequence[RolloutDocument],
        responses: Sequence[GeneratedResponse],
        scores: Sequence[RolloutScore | None],
        longest: Callable[[RolloutDocument], int],
    ) -> list[PromptTokens | None]:
        """Return the teacher's prompt of each response; None for that of the data.

        Args:
            documents: Documents that are replaced, those of one prompt next to each other, `sample` 0 first.
            longest: Returns the maximum number of tokens of a document with its response.
        """
        inputs = [
            self.function_input(document, response.tokens[response.last :])
            for document, response in zip(documents, responses, strict=True)
        ]
        attempts = [
            _attempt(own, response, score) for own, response, score in zip(inputs, responses, scores, strict=True)
        ]
        begins = [number for number, document in enumerate(documents) if document.sample == 0]
        groups = list(zip(begins, [*begins[1:], len(documents)], strict=True))
        found: list[PromptTokens | None] = [None] * len(documents)
        for route, (section, _, reader) in self.by_route.items():
            chosen = [
                (n, begin, end) for begin, end in groups for n in range(begin, end) if documents[n].route == route
            ]
            # an empty text is a template's way to say that there is no context to give
            texts = {
                n: render(section.template, _variables(inputs[n], attempts[begin:end], n - begin, section.success))
                for n, begin, end in chosen
            }
            made = self._read(reader, {n: text for n, text in texts.items() if text}, documents, inputs)
            for n, ids in made.items():
                if ids is not None and len(ids) + len(responses[n].tokens) <= longest(documents[n]):
                    found[n] = PromptTokens(ids, True)
            # no context, a row that cannot have it, or one that leaves no room for the response
            without = {n: "" for n in texts if found[n] is None}
            if section.missing == "skip":
                plain: dict[int, list[int] | None] = dict.fromkeys(without)
            else:
                plain = self._read(reader, without, documents, inputs)
            for n, ids in plain.items():
                found[n] = PromptTokens(ids, False)
        return found

    @staticmethod
    def _read(
        reader: ContextReader,
        texts: Mapping[int, str],
        documents: Sequence[RolloutDocument],
        inputs: Sequence[FunctionInput],
    ) -> dict[int, list[int] | None]:
        requests = [ContextRequest(documents[n], inputs[n].row, text) for n, text in texts.items()]
        return dict(zip(texts, reader.prompts(requests), strict=True))


def _attempt(own: FunctionInput, response: GeneratedResponse, score: RolloutScore | None) -> Response:
    """Return a response as templates read it; what it lacks is no key of it."""
    replies = [str(message["content"]) for message in response.messages if message["role"] != "assistant"]
    feedback = None if score is None else score.feedback
    if feedback is None and replies:
        feedback = "\n\n".join(replies)
    found = Response(answer=own.answer, messages=list(response.messages))
    if score is not None:
        found["reward"] = score.reward
    if feedback is not None and feedback.strip():
        found["feedback"] = feedback
    return found


def _variables(own: FunctionInput, group: Sequence[Mapping[str, Any]], index: int, success: float) -> dict[str, Any]:
    """Return the variables of a template for response `index` of a group."""
    mine = group[index]
    # by text and not by number: an equal response would show the teacher the answer that it scores
    others = [each for each in group if each["answer"].strip() != mine["answer"].strip()]
    rewarded = [each for each in others if "reward" in each]
    reached = [each for each in rewarded if each["reward"] >= success]
    failed = [each for each in rewarded if each["reward"] < success]
    found: dict[str, Any] = {"row": own.row, **prompt_variables(own.prompt)}
    found |= {name: mine[name] for name in ("reward", "feedback") if name in mine}
    if others:
        found["rollouts"] = others
    if reached:
        found["best"] = max(reached, key=lambda each: each["reward"])
    if failed:
        found["failed"] = min(failed, key=lambda each: each["reward"])
    return found


def prompt_variables(prompt: Sequence[Mapping[str, Any]] | str) -> dict[str, Any]:
    """Return `messages`, those before the response, and `prompt`, the text of the user's last one, or of a prompt."""
    if isinstance(prompt, str):
        return {"prompt": prompt, "messages": [{"role": "user", "content": prompt}]}
    asked = [message["content"] for message in prompt if message["role"] == "user"]
    return {"messages": list(prompt), **({"prompt": asked[-1]} if asked else {})}
