"""The README.md of a saved student: what it was made from, how close it came, and the recipe that made it.

Names and texts that people gave (models, data sets, the run) are written so that Markdown, HTML and YAML take them for
text and nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from distill.core.files import write_text
from distill.evaluation.evaluate import HeldOut, gap_in_words
from distill.teachers.measure import KL, SPANS, Measure, shown

# what the card says of a whole model, and of an adapter alone
MODEL = 'library_name: "transformers"', "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
ADAPTER = (
    'library_name: "peft"',
    "from peft import AutoPeftModelForCausalLM as AutoModelForCausalLM\nfrom transformers import AutoTokenizer\n",
)
MARKS = re.compile(r"([\\`*_{}\[\]()#+!|~<>&$])")


def write_model_card(
    folder: Path,
    *,
    name: str,
    teacher: str,
    student: str,
    data: str,
    recipe: str,
    before: HeldOut | None = None,
    after: HeldOut | None = None,
    versions: Mapping[str, str] | None = None,
    hub_models: tuple[str, ...] = (),
    datasets: tuple[str, ...] = (),
    licence: str | None = None,
    measure: Measure = KL,
) -> Path:
    """Write `README.md` into `folder`, which holds a model or an adapter alone.

    Args:
        teacher: What the teacher is, as the recipe says it.
        student: What the student started as.
        data: What it was trained on.
        before, after: Held-out figures; the table needs both.
        versions: Of the libraries that trained it.
        hub_models: Hub ids that this student descends from, for the card's metadata; others are left out.
        datasets: What it was trained and judged on; hub ids go into the metadata, others are left out.
        licence: Of the model that the student started as, as its own card says it; None where that is not known.
        measure: What the divergences are.
    """
    head: dict[str, str | list[str]] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["distillation"],
    }
    for key, names in (("base_model", hub_models), ("datasets", datasets)):
        if known := [name for name in names if re.fullmatch(r"[\w.-]+/[\w.-]+", name)]:
            head[key] = known
    head["license"] = licence or "unknown"  # the hub's own word for it
    parts = [
        # JSON is YAML, and quotes every text
        "---\n" + "\n".join(f"{key}: {json.dumps(value)}" for key, value in head.items()) + "\n---",
        f"# {escape(name)}",
        f"A student distilled from **{escape(teacher)}**.",
        f"| | |\n|---|---|\n| teacher | {escape(teacher)} |\n| student before | {escape(student)} |\n"
        f"| data | {escape(data)} |",
    ]
    if before is not None and after is not None:
        parts += ["## Held-out figures", figures_table(before, after, measure), _explanation(before, after, measure)]
    parts += [
        "## Use",
        fenced(
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            'student = AutoModelForCausalLM.from_pretrained("path/to/this/folder")\n'
            'tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")',
            "python",
        ),
        "The teacher's licence and terms of use may bind models made from its outputs; read them before sharing.",
        "## Recipe",
        fenced(recipe.strip(), "yaml"),
    ]
    if versions:
        parts.append(
            "Trained with " + ", ".join(f"{escape(key)} {escape(value)}" for key, value in versions.items()) + "."
        )
    path, text = folder / "README.md", "\n\n".join(parts) + "\n"
    if (folder / "adapter_config.json").is_file():
        for plain, adapted in zip(MODEL, ADAPTER, strict=True):
            text = text.replace(plain, adapted, 1)
    write_text(path, text)
    return path


def card_of_merged(text: str) -> str:
    """The card of an adapter as that of the model with the adapter merged; any other card as it is."""
    for plain, adapted in zip(MODEL, ADAPTER, strict=True):
        text = text.replace(adapted, plain, 1)
    return text


def licence_of(model: str) -> str | None:
    """The licence in the card of a model on this machine (a folder, or the hub's cache); None without one."""
    from huggingface_hub import metadata_load, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        local = Path(model).expanduser() / "README.md"
        path = local if local.is_file() else try_to_load_from_cache(model, "README.md")
        found = metadata_load(path) if isinstance(path, str | Path) else None
    except (OSError, ValueError, HFValidationError, yaml.YAMLError):  # somebody else's file
        return None
    value = (found or {}).get("license")
    return value if isinstance(value, str) and re.fullmatch(r"[a-z0-9.-]{1,64}", value) else None


def on_the_hub(*names: str | None) -> tuple[str, ...]:
    """Return those of some names that name no file here, each once."""
    return tuple(dict.fromkeys(name for name in names if name and not Path(name).exists()))


def figures_table(before: HeldOut, after: HeldOut, measure: Measure = KL) -> str:
    """Held-out figures of teacher, student before and student after, as a Markdown table."""
    name = measure.name
    lines = [f"| | forward {name} | reverse {name} | top-1 agreement | perplexity |", "|---|---:|---:|---:|---:|"]
    lines.append(f"| teacher | 0 | 0 | 100 % | {after.teacher_perplexity:,.2f} |")
    for title, row in (("student before", before), ("student after", after)):
        lines.append(
            f"| {title} | {shown(row.forward_kl)} | {shown(row.reverse_kl)} | {100 * row.agreement:.1f} % "
            f"| {row.student_perplexity:,.2f} |"
        )
    return "\n".join(lines)


def _explanation(before: HeldOut, after: HeldOut, measure: Measure) -> str:
    closed = gap_in_words(before, after).replace("%", " %")
    if measure == SPANS:
        return (
            f"Means over {after.tokens:,} held-out spans of text, in nats; teacher and student have different "
            "tokenizers and are compared where both have read the same bytes: shared tokens, spans of text, and the "
            "rest by sorted probabilities, so that the two divergences are not KL. Share of the gap closed: "
            f"**{closed}**."
        )
    cached = f"The teacher was read from a cache, so that these are not the KL but the {measure.name}. "
    stored = "" if measure == KL else cached
    return (
        f"Means over {after.tokens:,} held-out tokens, in nats; the student against the teacher's next-token "
        f"distributions. {stored}Share of the gap closed, (before - after) / before: "
        f"**{closed}**."
    )


def escape(text: str) -> str:
    """`text` on one line, with nothing in it that Markdown or HTML would act on."""
    plain = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    # a bare address would become a link
    return MARKS.sub(r"\\\1", plain).replace("://", ":\u200b//")


def fenced(text: str, language: str) -> str:
    """`text` as a code block, fenced by more backticks than any run of them inside."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
