"""The pages under docs/reference/settings: every setting of a recipe, a page for each section.

pages()     # {"index.md": "# Settings ...", "teacher.md": "# teacher ...", ...}
"""

from __future__ import annotations

from distill.commands.settings_schema import Setting, settings
from distill.recipe.renamed import REMOVED, RENAMED, RENAMED_VALUES

NOTE = "<!-- written by python -m scripts.docs -->"
# page by section; the longest name that a setting begins with counts
SECTIONS = {
    "teacher": ("teacher.md", "the teacher model, or the server or cache that stands for it"),
    "teachers": ("teachers.md", "several teachers: a mixture, or one for each row"),
    "student": ("student.md", "the student model, its initialisation and LoRA"),
    "data": ("data.md", "sources, formats, templates, packing, validation split"),
    "data.on_policy": ("on-policy.md", "student-generated outputs: sampling, engines, staleness"),
    "loss": ("loss.md", "divergences, weights, temperature, schedules, plugins"),
    "train": ("train.md", "steps, batch sizes, optimizer, precision, checkpoints"),
    "parallel": ("parallel.md", "how models are placed on several GPUs"),
    "eval": ("eval.md", "tasks that the student answers while it trains, batch of evaluations"),
    "generate": ("generate.md", "sample outputs before and after training"),
    "export": ("export.md", "a GGUF file of the student, written and measured at the end of a run"),
    "stages": ("stages.md", "runs one after another, such as prune, train, quantise"),
}
INTRODUCTION = """\
# Settings

{note}

Every setting of a recipe, by section. `distill settings FIELD` prints the same in the terminal \
and also finds a setting by the name that another tool gives it (TRL, torchtune, axolotl, LLaMA-Factory, ms-swift, \
KDFlow), or says why there is none; `distill schema` prints a JSON schema \
with which editors complete and check a recipe.

On the command line a setting is given as `section.name=value`; an item of a list (`[]`) by its number: \
`loss.terms.0.weight=0.5`.

| section | settings | contents |
|---|---:|---|
{rows}

Three settings belong to no section.
"""
FORMER_NAMES = """\
## Renamed settings

A recipe or an override with a former name is read until 1.0; one log line gives the present name. The same holds for \
the entries of `teachers` and for `stages`.

| former name | present name |
|---|---|
{rows}

Removed: {removed}.
"""


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    by_section: dict[str, list[Setting]] = {section: [] for section in ["", *SECTIONS]}
    for setting in settings():
        by_section[section_of(setting.name)].append(setting)
    rows = "\n".join(
        f"| [`{section}`]({file}) | {sum(item.name != section for item in by_section[section])} | {contents} |"
        for section, (file, contents) in SECTIONS.items()
    )
    introduction = INTRODUCTION.format(note=NOTE, rows=rows) + "\n" + _entries(by_section[""])
    found = {"index.md": f"{introduction.rstrip()}\n\n{_former_names()}"}
    for section, (file, _) in SECTIONS.items():
        heading, *rest = by_section[section]
        found[file] = f"# {section}\n\n{NOTE}\n\n{_sentence(heading.meaning)}\n\n{_entries(rest)}"
    return found


def _former_names() -> str:
    """Return the section of former names and values, and of settings that were removed."""
    renamed = dict(RENAMED)
    for setting, values in RENAMED_VALUES.items():
        renamed |= {f"{setting}: {former}": f"{setting}: {present}" for former, present in values.items()}
    rows = "\n".join(f"| `{former}` | `{present}` |" for former, present in sorted(renamed.items()))
    removed = "; ".join(f"`{name}` ({cure})" for name, (_, cure) in REMOVED.items())
    return FORMER_NAMES.format(rows=rows, removed=removed)


def section_of(name: str) -> str:
    """Return the section of SECTIONS that a setting belongs to; "" where it belongs to none."""
    plain = name.replace("[]", "")
    return max((section for section in SECTIONS if f"{plain}.".startswith(f"{section}.")), key=len, default="")


def _entries(found: list[Setting]) -> str:
    """Return a heading for each setting, with its description, type and default."""
    lines: list[str] = []
    for setting in found:
        lines += [f"## `{setting.name}`", "", _sentence(setting.meaning), "", _facts(setting), "{: .facts }", ""]
    return "\n".join(lines)


def _facts(setting: Setting) -> str:
    """Return the line of type, default and the names in other tools."""
    facts = [f"Type: {setting.type.replace(' | ', ', ')}"]
    facts += [f"default: `{setting.default}`"] if setting.default and setting.default != "required" else []
    facts += ["required"] if setting.default == "required" else []
    facts += [f"{tool}: `{name}`" for tool, name in setting.elsewhere.items()]
    return "; ".join(facts)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
