"""Write everything that is generated: `python -m scripts.docs [--check]`.

Tables of README.md and docs/ from measured rows; docs/reference/settings/ and recipes/recipe.schema.json from the
recipe's schema; docs/reference/cli.md from the command line's own definitions; docs/reference/api/ and the table of
docs/reference/kernels.md from the public names; docs/reference/recipes.md from the recipes; docs/guides/row-layouts.md
from the tests' table of rows; docs/reference/results.md, and the rows that `distill
compare --reference` reads, from the study's; tables of GPUs from the cards that
`check` knows; docs/contributing.md from CONTRIBUTING.md. `--check` writes nothing, and fails where a file differs from
what would be written.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(folder) for folder in (ROOT, ROOT / "kernels") if str(folder) not in sys.path]

from distill.cli import app  # noqa: E402
from distill.commands.settings_schema import json_schema  # noqa: E402
from distill.recipe.aliases import names_elsewhere  # noqa: E402
from distill.recipe.shipped import SCHEMA_FILE, shipped_recipes  # noqa: E402
from distill.reports import reference  # noqa: E402
from scripts import (  # noqa: E402
    api_pages,
    chat_samples,
    compiled,
    gpu_page,
    launched_tables,
    readme,
    reference_results,
    row_layouts_page,
    settings_pages,
    template_page,
)
from scripts.families import page as family_page  # noqa: E402
from scripts.study.planner import read_plan  # noqa: E402
from scripts.study.report import finished, markdown  # noqa: E402

NOTE = settings_pages.NOTE


def generated() -> dict[Path, str]:
    """Every generated file and what it should hold."""
    rows = readme.newest_rows()
    docs = ROOT / "docs"
    files = {
        ROOT / "recipes" / SCHEMA_FILE: json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n",
        docs / "reference/cli.md": cli_page(),
        docs / "reference/compiled-kernels.md": compiled.page(),
        docs / "contributing.md": contributing_page(),
        docs / "reference/results.md": reference_results.page(NOTE),
        ROOT / "distill/reports" / reference.FILE: reference_results.package_data(),
        docs / "guides/row-layouts.md": row_layouts_page.page(NOTE),
        **{docs / "reference/settings" / name: text for name, text in settings_pages.pages().items()},
        **{docs / "reference/api" / name: text for name, text in api_pages.pages().items()},
    }
    for picture in readme.STUDY_RESULTS.glob("*.svg"):  # the site holds what lies under docs/ only
        files[docs / "assets" / picture.name] = picture.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted(docs.rglob("*.md"))]:
        if path not in files:
            text = readme.fill(path.read_text(encoding="utf-8"), rows)
            text = _block(text, "kernels", api_pages.table(rows)) if path.name == "kernels.md" else text
            text = _block(text, "launched", launched_tables.tables(rows)) if path.name == "benchmarks.md" else text
            text = _block(text, "families", gpu_page.families()) if path.name == "gpus.md" else text
            text = _block(text, "cards", gpu_page.cards()) if path.name == "gpus.md" else text
            text = _block(text, "loss times", gpu_page.loss_times()) if path.name == "gpus.md" else text
            text = _block(text, "read", row_layouts_page.read_lists()) if path.name == "data-formats.md" else text
            text = _block(text, "other tools", other_tools_table()) if path.name == "from-other-tools.md" else text
            text = chat_templates(text) if path.name == "chat-templates.md" else text
            text = _block(text, "pruned", study_table("shrink-trained")) if path.name == "shrink.md" else text
            text = _block(text, "quantised", study_table("quantise")) if path.name == "shrink.md" else text
            text = _block(text, "models", family_page.table()) if path.name == "supported-models.md" else text
            files[path] = _block(text, "recipes", recipes_part()) if path.name == "recipes.md" else text
    return files


def other_tools_table() -> str:
    """Return our settings with their names in other tools."""
    named = names_elsewhere()
    tools = sorted({tool for names in named.values() for tool in names}, key=("TRL", "torchtune", "axolotl").index)
    lines = ["| " + " | ".join([*tools, "here"]) + " |", "|---" * (len(tools) + 1) + "|"]
    for setting, names in named.items():
        cells = [", ".join(f"`{each}`" for each in names[tool].split(", ")) if tool in names else "" for tool in tools]
        lines.append("| " + " | ".join([*cells, f"`{setting}`"]) + " |")
    return "\n".join(lines)


def study_table(plan: str) -> str:
    """Return the table of a study's rows."""
    return markdown(read_plan(plan), finished(readme.STUDY_RESULTS, plan)).rstrip()


def chat_templates(text: str) -> str:
    """Return docs/guides/chat-templates.md with its example of `distill inspect` and its table."""
    return template_table(_block(text, "inspect", chat_samples.inspected()))


def template_table(text: str) -> str:
    """Return the page with its table of templates made anew, or as it is where the templates cannot be read."""
    try:
        return _block(text, "templates", template_page.table())
    except OSError as error:
        print(f"docs/guides/chat-templates.md: its table is left as it is: {error}", file=sys.stderr)
        return text


def _block(text: str, name: str, content: str) -> str:
    """`text` with what stands between `<!-- generated: NAME -->` and `<!-- end generated -->` replaced."""
    before, opening, rest = text.partition(f"<!-- generated: {name} -->\n")
    _, closing, after = rest.partition("<!-- end generated -->")
    if not opening or not closing:
        raise ValueError(f"no block <!-- generated: {name} --> ... <!-- end generated -->")
    return f"{before}{opening}\n{content}\n{closing}{after}"


def contributing_page() -> str:
    """Return CONTRIBUTING.md as a page of the site: links are made relative to docs/, other files become plain text."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    text = re.sub(r"\[([^]]+)\]\((?![a-z]+:|#|docs/)[^)]+\)", r"\1", text).replace("](docs/", "](")
    # an indented block's brackets are taken for links by the site's check of references
    text = re.sub(r"(?:(?<=\n\n)|\A)((?: {4}.*\n)+)", lambda block: f"```text\n{textwrap.dedent(block[1])}```\n", text)
    title, rest = text.split("\n", 1)
    return f"{title}\n\n{NOTE}\n{rest}"


def commands() -> Iterator[tuple[str, Any]]:
    """Every command of `distill` with its definition, those of groups after their group."""
    import typer

    def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        yield name, command
        for key, inner in getattr(command, "commands", {}).items():
            yield from walk(f"{name} {key}", inner)

    return walk("distill", typer.main.get_command(app))


def cli_page() -> str:
    """Return docs/reference/cli.md."""
    lines = ["# Commands", "", NOTE, ""]
    lines += ["`distill --help` and `distill COMMAND --help` print this page in the terminal.", ""]
    lines += ["Exit codes: 0 done; 1 a check, the machine or the numerics failed; 2 invalid input (one line); "]
    lines += ["130 Ctrl-C, which finishes the step, writes a checkpoint and prints the command that continues.", ""]
    for name, command in commands():
        lines += [f"## {name}", ""]
        for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
            is_block = paragraph.startswith("\b")
            text = paragraph.removeprefix("\b\n")
            lines += [
                *(
                    [f"```{'text' if name == 'distill' else 'sh'}", text, "```"]
                    if is_block
                    else [" ".join(text.split())]
                ),
                "",
            ]
        hints = get_type_hints(command.callback)
        rows = [_parameter(parameter, hints.get(parameter.name)) for parameter in command.params]
        if rows:
            lines += ["| argument or option | default | |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _parameter(parameter: Any, hint: Any) -> str:
    """A line of a command's table: an argument, or an option with what it takes."""
    is_argument = not parameter.opts[0].startswith("-")
    metavar = parameter.metavar or ("" if getattr(parameter, "is_flag", False) else parameter.name.upper())
    if isinstance(hint, type) and issubclass(hint, Enum):
        metavar = "|".join(choice.value for choice in hint)
    names = "/".join([*parameter.opts, *parameter.secondary_opts])
    text = metavar if is_argument else f"{names} {metavar}".strip()
    default = "required" if parameter.required else _value(parameter.default)
    return f"| `{text.replace('|', chr(92) + '|')}` | {default} | {getattr(parameter, 'help', None) or ''} |"


def _value(default: Any) -> str:
    if default is None or default is False or default == [] or callable(default):
        return ""
    return f"`{getattr(default, 'value', default)}`" if default is not True else "on"


def recipes_part() -> str:
    """The shipped recipes, each as it is, under its title."""
    lines: list[str] = []
    for recipe in shipped_recipes():
        lines += [
            f"## {recipe.name}",
            "",
            recipe.title + ".",
            "",
            "```yaml",
            recipe.path.read_text().rstrip(),
            "```",
            "",
        ]
    return "\n".join(lines)


def main() -> int:
    """Write the generated pages, or with --check compare them; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file is out of date")
    args = parser.parse_args()
    files = generated()
    stale = [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if args.check:
            print(f"{path.relative_to(ROOT)} is out of date; run python -m scripts.docs", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
