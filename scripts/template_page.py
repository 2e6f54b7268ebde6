"""The table of chat templates in docs/guides/chat-templates.md, found by rendering each of TRL's original templates."""

from __future__ import annotations

from typing import Any

from distill.data.chat import ChatOptions
from distill.data.rendering import TemplateError
from distill.data.rows import RowFault
from scripts.public_templates import TRL, chat_template, originals

QUESTION = {"role": "user", "content": "How is it?"}
SYSTEM = {"role": "system", "content": "Be brief."}
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string", "description": "Where."}}, "required": []}
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": PARAMETERS}}


def _answer(text: str = "It is fine.", calls: int = 0, **more: str) -> dict[str, Any]:
    made = [
        {"id": f"zq000000{number}", "type": "function", "function": {"name": "look", "arguments": {"place": place}}}
        for number, place in enumerate(("Oslo", "Rome")[:calls])
    ]
    return {"role": "assistant", "content": text, **more, **({"tool_calls": made} if made else {})}


# column, messages, tools
CASES = {
    "system": ([SYSTEM, QUESTION, _answer()], None),
    "tools": ([QUESTION, _answer("", 1)], [TOOL]),
    "parallel calls": ([QUESTION, _answer("", 2)], [TOOL]),
    "text beside a call": ([QUESTION, _answer(calls=1)], [TOOL]),
    "reasoning": (
        [QUESTION, _answer(reasoning_content="I look."), QUESTION, _answer(reasoning_content="Again.")],
        None,
    ),
}


def _cell(template: Any, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
    try:
        made = template.for_training(messages, tools, ChatOptions(reasoning="require"))
    except (RowFault, TemplateError):
        return ""
    return "yes" if made.examples else ""


def row(name: str, source: str) -> list[str]:
    """A line of the table."""
    template = chat_template(name, source)
    cells = [_cell(template, *case) for case in CASES.values()]
    turns, thoughts = ([QUESTION, _answer(**more)] * 2 for more in ({}, {"reasoning_content": "I look."}))
    rewrites = [template.for_training(messages).rewritten for messages in (turns, thoughts)]
    rewritten = "every turn" if rewrites[0] else "reasoning" if rewrites[1] else ""
    content = "parts" if template.adapter.parts else "text"
    closings = " ".join(f"`{token}`" for token in sorted(template.closings())).replace("|", "\\|")
    return [f"`{name}`", content, *cells, rewritten, closings]


def table() -> str:
    """All of them, as Markdown.

    Raises:
        OSError: the wheel with the templates cannot be had.
    """
    heading = ["template", "content", *CASES, "rewrites history", "ends turns with"]
    rows = [row(name, source) for name, source in originals().items()]
    lines = [heading, ["---"] * len(heading), *rows]
    whose = f"The {len(rows)} templates as models ship them, out of `{TRL}`:"
    return whose + "\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
