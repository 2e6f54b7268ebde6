"""Command `chat`: chat with a run's student and, if requested, its teacher."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distill.commands.arguments import (
    MaxNewTokens,
    TargetArgument,
    TeacherModel,
    Temperature,
    WithTeacher,
    load_models,
)
from distill.core import console

if TYPE_CHECKING:
    from distill.generation.prompts import Turn

NEW = "/new"


def chat(
    target: TargetArgument,
    teacher: TeacherModel = None,
    with_teacher: WithTeacher = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.7,
) -> None:
    """Chat with a student; each model keeps its own history.

    Ctrl-D quits, Ctrl-C stops a response, /new clears the history. From a pipe, each line is a turn. A model without a
    chat template continues each line as text.

    \b
    distill chat support-bot
    distill chat support-bot --with-teacher --temperature 0
    printf 'Hello!\\nAnd who are you?\\n' | distill chat support-bot
    """
    models, tokenizers = load_models(target, teacher, with_teacher)
    remembers = bool(getattr(tokenizers["student"], "chat_template", None))
    if not remembers:
        console.print_error("the tokenizer has no chat template: each line is continued as text, without history")
    beginning: list[Turn] = [{"role": "system", "content": system}] if system is not None else []
    history = {name: [*beginning] for name in models}
    for line in _lines():
        if line == NEW:
            history = {name: [*beginning] for name in models}
            continue
        for name, model in models.items():
            if len(models) > 1:
                console.print_lines(f"--- {name}")
            turns = history[name]
            tokenizer = tokenizers[name]
            turns.append({"role": "user", "content": line})
            if remembers:
                _drop_oldest_turns(turns, len(beginning), model, tokenizer, max_new_tokens)
            answer = _answer(model, tokenizer, turns if remembers else line, max_new_tokens, temperature)
            turns.append({"role": "assistant", "content": answer})


def _lines() -> Iterator[str]:
    asks = sys.stdin.isatty()
    if asks:
        with contextlib.suppress(ImportError):  # Windows
            import readline  # noqa: F401  (input() then knows the arrow keys)
    while True:
        try:
            line = input("> " if asks else "").strip()
        except EOFError:
            if asks:
                console.print_lines("")
            return
        if line:
            yield line


def _drop_oldest_turns(turns: list[Turn], prefix: int, model: Any, tokenizer: Any, max_new_tokens: int) -> None:
    from distill.generation.prompts import encode_prompt

    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    while most and len(turns) > prefix + 2 and len(encode_prompt(tokenizer, turns)) + max_new_tokens > most:
        del turns[prefix : prefix + 2]
        console.print_error(f"the oldest turn was dropped: the model has at most {most:,} positions")


def _answer(model: Any, tokenizer: Any, prompt: str | list[Turn], max_new_tokens: int, temperature: float) -> str:
    """Stream a response and return it; on Ctrl-C, the part written so far."""
    from distill.evaluation.generate import stream

    pieces: list[str] = []

    def write(piece: str) -> None:
        pieces.append(piece)
        sys.stdout.write(console.printable(piece))
        sys.stdout.flush()

    try:
        return stream(model, tokenizer, prompt, write, max_new_tokens=max_new_tokens, temperature=temperature)
    except KeyboardInterrupt:
        return "".join(pieces)
    finally:
        console.print_lines("")
