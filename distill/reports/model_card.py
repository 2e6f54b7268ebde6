"""Model card of a saved student: its origin, its held-out metrics, and the recipe.

Names and texts of users (models, data sets, the run) are escaped for Markdown, HTML and YAML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from distill.core.files import write_text
from distill.evaluation.evaluate import HeldOut, describe_reduction
from distill.objectives.measure import KL, SPANS, DivergenceUnit, metric_text

# lines of the card for a whole model, and for an adapter alone
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
    measure: DivergenceUnit = KL,
) -> Path:
    """Write `README.md` into `folder`, which holds a model or an adapter.

    Args:
        teacher: Name of the teacher.
        student: Name of the untrained student.
        data: Name of the training data.
        before, after: Held-out metrics; the table needs both.
        versions: Versions of the libraries, by name.
        hub_models: Models that this student descends from; hub ids go into the card's metadata.
        datasets: Training and held-out data; hub ids go into the metadata.
        licence: Licence of the untrained student, from its card; None where unknown.
    """
    head: dict[str, str | list[str]] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["distillation"],
    }
    for key, names in (("base_model", hub_models), ("datasets", datasets)):
        known = [name for name in names if re.fullmatch(r"[\w.-]+/[\w.-]+", name)]
        if known:
            head[key] = known
    head["license"] = licence or "unknown"  # the hub's keyword
    parts = [
        # JSON is YAML, and quotes every text
        "---\n" + "\n".join(f"{key}: {json.dumps(value)}" for key, value in head.items()) + "\n---",
        f"# {escape(name)}",
        f"A student distilled from **{escape(teacher)}**.",
        f"| | |\n|---|---|\n| teacher | {escape(teacher)} |\n| student before | {escape(student)} |\n"
        f"| data | {escape(data)} |",
    ]
    if before is not None and after is not None:
        parts += ["## Held-out figures", metrics_table(before, after, measure), _explanation(before, after, measure)]
    parts += [
        "## Use",
        code_block(
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            'student = AutoModelForCausalLM.from_pretrained("path/to/this/folder")\n'
            'tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")',
            "python",
        ),
        "The teacher's licence and terms of use may bind models made from its outputs; read them before sharing.",
        "## Recipe",
        code_block(recipe.strip(), "yaml"),
    ]
    if versions:
        parts.append(
            "Trained with " + ", ".join(f"{escape(key)} {escape(value)}" for key, value in versions.items()) + "."
        )
    path = folder / "README.md"
    text = "\n\n".join(parts) + "\n"
    if (folder / "adapter_config.json").is_file():
        for plain, adapted in zip(MODEL, ADAPTER, strict=True):
            text = text.replace(plain, adapted, 1)
    write_text(path, text)
    return path


def merged_card(text: str) -> str:
    """Return an adapter's card changed to that of the merged model; any other card unchanged."""
    for plain, adapted in zip(MODEL, ADAPTER, strict=True):
        text = text.replace(adapted, plain, 1)
    return text


def licence_of(model: str) -> str | None:
    """Return the licence in the card of a model on this machine (a folder or the hub's cache); None without one."""
    from huggingface_hub import metadata_load, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        local = Path(model).expanduser() / "README.md"
        path = local if local.is_file() else try_to_load_from_cache(model, "README.md")
        found = metadata_load(path) if isinstance(path, str | Path) else None
    except (OSError, ValueError, HFValidationError, yaml.YAMLError):  # a malformed card of another author
        return None
    value = (found or {}).get("license")
    return value if isinstance(value, str) and re.fullmatch(r"[a-z0-9.-]{1,64}", value) else None


def hub_ids(*names: str | None) -> tuple[str, ...]:
    """Return the names that name no local file, without duplicates."""
    return tuple(dict.fromkeys(name for name in names if name and not Path(name).exists()))


def metrics_table(before: HeldOut, after: HeldOut, measure: DivergenceUnit = KL) -> str:
    """Return held-out metrics of teacher, student before and student after, as a Markdown table."""
    name = measure.name
    lines = [f"| | forward {name} | reverse {name} | top-1 agreement | perplexity |", "|---|---:|---:|---:|---:|"]
    lines.append(f"| teacher | 0 | 0 | 100 % | {after.teacher_perplexity:,.2f} |")
    for title, row in (("student before", before), ("student after", after)):
        lines.append(
            f"| {title} | {metric_text(row.forward_kl)} | {metric_text(row.reverse_kl)} | {100 * row.agreement:.1f} % "
            f"| {row.student_perplexity:,.2f} |"
        )
    return "\n".join(lines)


def _explanation(before: HeldOut, after: HeldOut, measure: DivergenceUnit) -> str:
    closed = describe_reduction(before, after).replace("%", " %")
    if measure == SPANS:
        return (
            f"Means over {after.tokens:,} held-out spans of text, in nats. Teacher and student have different "
            "tokenizers and are compared where both have read the same bytes: shared tokens, spans of text, and the "
            "rest by sorted probabilities, so that the two divergences are not KL. Relative reduction: "
            f"**{closed}**."
        )
    cached = f"The teacher was read from a cache, so these are not the KL but the {measure.name}. "
    stored = "" if measure == KL else cached
    return (
        f"Means over {after.tokens:,} held-out tokens, in nats; the student against the teacher's next-token "
        f"distributions. {stored}Relative reduction, (before - after) / before: "
        f"**{closed}**."
    )


def escape(text: str) -> str:
    """Return `text` on one line, escaped for Markdown and HTML."""
    plain = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    # a bare URL would become a link
    return MARKS.sub(r"\\\1", plain).replace("://", ":\u200b//")


def code_block(text: str, language: str) -> str:
    """Return `text` as a code block, its fence longer than any run of backticks inside."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
