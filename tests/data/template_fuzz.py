"""Random conversations through chat templates: what is trained for a turn is what the template renders for that turn.

    PYTHONPATH=. python tests/data/template_fuzz.py                    # 60 through all templates of TRL and llama.cpp
    PYTHONPATH=. python tests/data/template_fuzz.py 200 --seed 3 gemma4 qwen3

The oracle is the template's own rendering. Of the text up to a turn, the part that changes with the words of the
messages before it ends where the turn may begin, and the part that does not change with the turn's own words ends where
it must have begun; between them stands what the generation prompt has there too. A row that is dropped with a reason is
no fault.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from distill.data.assistant_turns import RenderedChat
from distill.data.chat import ChatOptions, ChatTemplate
from distill.data.known_columns import REASONING
from distill.data.messages import QUESTION, content_of
from distill.data.rendering import Message, Tools
from distill.data.rows import RowFault

SETTINGS = ("all", "each", "last")
ENDING = " and please answer in one short sentence, as always, without the question"
WORDS = ("river", "stone", "<b>bold</b>", "naïve", "{x}", "two\nlines", "'quoted'", "tab\there", "42", "ok")
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks something up.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string", "description": "x"}}},
    },
}


class Conversation(NamedTuple):
    """A conversation to render."""

    messages: list[Message]
    tools: Tools


def conversation(rng: random.Random) -> Conversation:
    """Return a conversation of a random shape: turns in any order, texts that end alike or are the same."""
    messages: list[Message] = []
    has_tools = rng.random() < 0.3
    if rng.random() < 0.4:
        messages.append({"role": rng.choice(("system", "system", "developer")), "content": _text(rng, "S", 0)})
    alike = rng.choice(("", "", ENDING, "same"))
    thinks = rng.choice((0.0, 0.0, 0.5, 1.0))
    for number in range(rng.randint(1, 5)):
        if rng.random() < 0.95:
            messages.append({"role": "user", "content": _text(rng, "Q", number, alike)})
        if has_tools and rng.random() < 0.5:
            messages += _calls(rng, number, thinks)
        if rng.random() < 0.9:
            messages.append(_answer(rng, number, alike, thinks))
        if rng.random() < 0.1:
            messages.append(_answer(rng, number + 10, alike, thinks))
    return Conversation(messages, [TOOL] if has_tools else None)


def _text(rng: random.Random, kind: str, number: int, alike: str = "") -> str:
    if alike == "same":
        return {"S": "Be kind.", "Q": "And now, what is it?", "A": "It is nine.", "T": "Let me see."}[kind]
    inner = " ".join(rng.choices(WORDS, k=rng.randint(0, 4)))
    return f"{kind}{number}x {inner} {kind.lower()}{number}y" + alike + rng.choice(("", "", " ", "\n"))


def _answer(rng: random.Random, number: int, alike: str, thinks: float) -> Message:
    answer: Message = {"role": "assistant", "content": _text(rng, "A", number, alike)}
    if rng.random() < thinks:
        thought = _text(rng, "T", number, alike)
        if rng.random() < 0.3:
            return {**answer, "content": f"<think>\n{thought}\n</think>\n\n{answer['content']}"}
        return {**answer, rng.choice(REASONING): thought}
    return answer


def _calls(rng: random.Random, number: int, thinks: float) -> list[Message]:
    calls = [
        {
            "id": f"call{number:03d}x{place}",
            "type": "function",
            "function": {"name": "look_up", "arguments": {"what": f"W{number}x{place} {rng.choice(WORDS)}"}},
        }
        for place in range(rng.choice((1, 1, 2)))
    ]
    asks: Message = {
        "role": "assistant",
        "content": rng.choice(("", _text(rng, "A", number + 20))),
        "tool_calls": calls,
    }
    if rng.random() < thinks:
        asks[REASONING[0]] = _text(rng, "T", number + 20)
    results = [
        {"role": "tool", "name": "look_up", "tool_call_id": call["id"], "content": _text(rng, "R", number)}
        for call in calls
    ]
    return [asks, *results]


def faults_of(template: ChatTemplate, talk: Conversation, train_on: str) -> list[str] | None:
    """Return what is trained wrongly; None where the row is dropped."""
    from distill.data.formats import RowFormat

    try:
        sample = RowFormat("chat", {"messages": "messages"}).sample({"messages": talk.messages, "tools": talk.tools})
        assert sample.messages is not None
        made = template.for_training(sample.messages, sample.tools, ChatOptions(train_on))  # type: ignore[arg-type]
    except RowFault:
        return None
    own = template.variant(sample.tools)
    adapted = own.adapter(sample.messages)
    found = []
    for example in made.examples:
        for turn, text, begin in _turns_of(example):
            found += [f"turn {turn}: {fault}" for fault in _turn_faults(own, adapted, sample.tools, turn, text, begin)]
    return found


def _turns_of(example: RenderedChat) -> Iterator[tuple[int, str, str]]:
    """Yield the turns of an example: number, trained text and the text before it."""
    for turn in dict.fromkeys(example.turns):
        spans = [span for span, number in zip(example.spans, example.turns, strict=True) if number == turn]
        start = spans[0][0]  # a turn may have several ranges, with unmarked text between them
        yield turn, example.text[start : spans[-1][1]], example.text[:start]


def _turn_faults(
    template: ChatTemplate, messages: Sequence[Message], tools: Tools, turn: int, text: str, before: str
) -> Iterator[str]:
    upto = template.raw(messages[: turn + 1], tools).text
    prompt = template.raw(messages[:turn], tools, prompt=True).text
    # --- the prompt is that of inference, or a part of it: a template may open a thought that a finished turn lacks
    # or has no header for the turn, where the finished turn has one
    longer, shorter = sorted((prompt, before), key=len, reverse=True)
    if not longer.startswith(shorter) or not _plain_prompt(template, tools).endswith(longer[len(shorter) :]):
        yield f"the text before it is no prompt: {before[-60:]!r}, not {prompt[-60:]!r}"
        return
    # --- what is trained ends the text up to the turn, but for what closes it
    body = text
    for stop in sorted(template.stops, key=len, reverse=True):
        if not upto.rstrip().endswith(body.rstrip()) and body.endswith(stop):
            body = body.removesuffix(stop)
    place = upto.rfind(body.rstrip())
    closes = template.special.sub("", upto[place + len(body.rstrip()) :]).strip() if place >= 0 else "?"
    if closes:
        thought = _lost_thought(messages[turn], prompt)
        if not (thought and body.startswith(thought)):
            yield f"it is not the end of the text up to it: {text[:60]!r}, not {upto[-60:]!r}"
            return
        body = body[len(thought) :].lstrip().removeprefix("</think>").lstrip("\n")
        place = upto.rfind(body.rstrip())
    # --- it begins after the words of earlier messages, and not after its own
    lowest, highest = _bounds(template, messages, tools, turn, upto)
    if not lowest <= place <= highest:
        yield f"it begins at {place} of the text up to it, expected {lowest} to {highest}: {upto[place : place + 60]!r}"


def _lost_thought(message: Message, prompt: str) -> str:
    """Return the reasoning that a template drops after a generation prompt that opens it."""
    thought = content_of({**message, "content": _plain(message.get("content"))}).thought
    return thought.strip() if prompt.rstrip().endswith("<think>") else ""


def _plain(content: Any) -> Any:
    return "".join(part["text"] for part in content) if isinstance(content, list) else content


def _plain_prompt(template: ChatTemplate, tools: Tools) -> str:
    """Return a single question with its generation prompt."""
    return template.raw(template.adapter([QUESTION]), tools, prompt=True).text


def _bounds(template: ChatTemplate, messages: Sequence[Message], tools: Tools, turn: int, upto: str) -> tuple[int, int]:
    """Return between which places of the text up to a turn the turn begins."""
    lowest, highest = 0, len(upto)
    for earlier in range(turn):
        changed = [*messages[:earlier], _other_end(messages[earlier]), *messages[earlier + 1 : turn + 1]]
        if (other := _rendered(template, changed, tools)) is not None and other != upto:
            lowest = max(lowest, len(upto) - _same(upto[::-1], other[::-1]))
    if (other := _rendered(template, [*messages[:turn], _other_begin(messages[turn])], tools)) is not None:
        highest = min(highest, _same(upto, other))
    return lowest, highest


def _rendered(template: ChatTemplate, messages: Sequence[Message], tools: Tools) -> str | None:
    try:
        return template.raw(messages, tools).text
    except RowFault:
        return None


def _changed(value: Any, end: bool) -> Any:
    """Return a text with another last or first letter, between which and the rest nothing else stands."""
    if isinstance(value, list):
        return [
            {**part, "text": _changed(part["text"], end)} if isinstance(part.get("text"), str) else part
            for part in value
        ]
    if not isinstance(value, str) or not value.strip() or "<think>" in value:
        return value
    return value.rstrip() + "ÖÄ" if end else "ÖÄ" + value.lstrip()


def _other_end(message: Message) -> Message:
    return {**message, "content": _changed(message.get("content"), True)}


def _other_begin(message: Message) -> Message:
    made = {**message, "content": _changed(message.get("content"), False)}
    return made | {name: _changed(message[name], False) for name in REASONING if name in message}


def _same(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def run(templates: Mapping[str, ChatTemplate], count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Return the number of cells by their outcome (right, refused, wrong), and the wrong ones."""
    outcomes, wrong = Counter[str](), list[str]()
    for name, template in templates.items():
        rng = random.Random(seed)
        for number in range(count):
            talk = conversation(rng)
            for train_on in SETTINGS:
                faults = faults_of(template, talk, train_on)
                outcomes["refused" if faults is None else "wrong" if faults else "right"] += 1
                wrong += [f"{name}, conversation {number}, {train_on}: {fault}" for fault in faults or ()]
    return outcomes, wrong


def main() -> None:
    """Print the counts and the cells that are wrong."""
    from scripts.public_templates import LLAMA_CPP, chat_template, originals, stops_in, templates

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=60, help="conversations for each template")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("names", nargs="*", help="names of templates; all by default")
    given = parser.parse_args()
    chosen = {name: chat_template(name, text) for name, text in originals().items()}
    for name, text in templates(LLAMA_CPP).items():
        chosen[f"llama.cpp/{name}"] = chat_template(name, text, stops_in(text))
    chosen = {
        name: template
        for name, template in chosen.items()
        if not given.names or any(name.rpartition("/")[2].startswith(part) for part in given.names)
    }
    outcomes, wrong = run(chosen, given.count, given.seed)
    print("\n".join(wrong))
    print(f"{len(chosen)} templates, {outcomes.total():,} cells: {dict(outcomes)}")


if __name__ == "__main__":
    main()
