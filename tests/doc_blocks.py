"""README.md and docs/ taken apart: links, anchors, and blocks of code with what stands above them."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->")
REFUSED = re.compile(r"<!-- output, exit code [12] -->")
SEPARATORS = {"&&", "||", "|", ";", "&"}


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        page: the file.
        line: its first line, from 1.
        language: after the fence.
        text: what is inside.
        excuse: why it is not run; None where it is.
        refused: it shows a refusal, which test_guides.py holds to what is printed.
    """

    page: Path
    line: int
    language: str
    text: str
    excuse: str | None
    refused: bool = False

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@functools.cache
def _tokens(page: Path) -> list[Token]:
    """The blocks of a page, whose sentences are not taken apart: that takes three quarters of the time."""
    return MarkdownIt().disable("inline").parse(page.read_text(encoding="utf-8"))


def blocks(*languages: str) -> list[Block]:
    """All blocks of these languages, in order."""
    found = []
    for page in PAGES:
        above = ""
        for token in _tokens(page):
            if token.type == "fence" and token.info.split(" ")[0] in languages:
                excuse = NOT_RUN.search(above)
                line = token.map[0] + 1 if token.map else 0
                refused = REFUSED.search(above) is not None
                found.append(Block(page, line, token.info, token.content, excuse[1] if excuse else None, refused))
            if not token.type.endswith("_close"):
                above = token.content if token.type == "html_block" else ""
    return found


def links(page: Path) -> Iterator[str]:
    """Every address that a page points at, pictures and HTML included."""
    for token in MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8")):
        for part in token.children or [token]:
            target = part.attrGet("href") or part.attrGet("src")
            if target:
                yield str(target)
            if part.type.startswith("html"):
                yield from re.findall(r"(?:href|src|srcset)=\"([^\"]+)\"", part.content)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: slugs of its headings, and names of its references."""
    tokens = MarkdownIt().parse(page.read_text(encoding="utf-8"))
    titles = [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]
    slugs: dict[str, int] = {}
    found = set(re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), re.M))
    for title in titles:
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
        slug = re.sub(r"[^\w\s-]", "", plain).strip().lower().replace(" ", "-")
        count = slugs.get(slug, 0)
        slugs[slug] = count + 1
        found.add(f"{slug}-{count}" if count else slug)
    return found


def shell_commands(text: str) -> Iterator[list[str]]:
    """The commands of a shell block, as words: continued lines joined, comments and variables left out."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in SEPARATORS:
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words.pop(0)
                if words:
                    yield words
                words = []
            else:
                words.append(word)


def until_redirection(words: list[str]) -> list[str]:
    """A command's words without where its output goes."""
    return words[: next((index for index, word in enumerate(words) if set(word) <= {"<", ">"}), len(words))]
