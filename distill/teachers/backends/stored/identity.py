"""Identity of a cache's teacher, and the check that a recipe has the same one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from distill.data.chat import load_template
from distill.data.token_cache import tokenizer_hash
from distill.recipe import Recipe
from distill.teachers.backends.stored.format import Plan


def text_hashes(recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, str | None]:
    """Return hashes of the tokenizer and the chat template that the data are made with; None where there is none."""
    if tokenizer is None:
        return {"tokenizer": None, "template": None}
    # variables that the template of another family's teacher does not read are those of the student's template alone
    template = load_template(recipe.data.chat_template, tokenizer, kwargs=recipe.data.chat_template_kwargs)
    text = None if template is None else hashlib.sha256(template.definition.encode()).hexdigest()
    return {"tokenizer": tokenizer_hash(tokenizer), "template": text}


def require_same_teacher(
    here: Mapping[str, object] | None,
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase | None,
    manifest: Plan,
    path: Path,
) -> None:
    """Compare a recipe with the cache it names: the teacher, if it names one, the tokenizer and the template.

    Args:
        here: Identity of the recipe's teacher (`teacher_identity`); None if the recipe names no teacher.
        recipe: Recipe whose chat template renders the data.
        tokenizer: Tokenizer of the data; None for random tokens.
        path: Folder of the cache, for error messages.
    """
    maker = manifest["teacher"]
    by_files = here is not None and bool(here["files_sha256"] and maker["files_sha256"])
    names = ("files_sha256", "adapter") if by_files else ("init", "config", "model", "revision", "adapter")
    for name in names if here is not None else ():
        if here is not None and here[name] != maker[name]:
            shown = "the model's files differ: " if name == "files_sha256" else ""
            raise ValueError(
                f"teacher.{'model' if shown else name}: {shown}the cache {path} was made by "
                f"{maker['model'] if shown else maker[name]!r}, the recipe names "
                f"{here['model'] if shown else here[name]!r}; leave it out to take the cache as it is"
            )
    now = text_hashes(recipe, tokenizer)
    for name, field in (("tokenizer", "teacher.path"), ("template", "data.chat_template")):
        if now[name] != manifest["text"][name]:
            raise ValueError(f"{field}: expected the {name} of the cache {path}, got another; cache again")


def description(manifest: Plan) -> str:
    if manifest["kind"] == "hidden":
        held = f"hidden states of {manifest['hidden']:,} and its head"
    else:
        read = {
            "bucket": f"{manifest['k']} likeliest of {manifest['vocabulary']:,} tokens and the rest as one",
            "renormalize": f"{manifest['k']} likeliest of {manifest['vocabulary']:,} tokens, as if no others were",
            "sampled": f"{manifest['k']} tokens drawn from {manifest['vocabulary']:,}",
        }[manifest["tail"]]
        held = f"{read}, temperature {manifest['temperature']:g}"
    return f"{manifest['positions']:,} positions of {manifest['documents']:,} documents: {held}"


IDENTITY = ("kind", "k", "tail", "temperature", "dtype", "vocabulary", "hidden", "scale", "softcap", "teacher", "text")


def fingerprint_of(plan: Plan) -> dict[str, object]:
    """Return a fingerprint of the stored outputs and their teacher, whether its weights are loaded or not."""
    identity = {name: plan.get(name) for name in (*IDENTITY, "weights")}
    return {"kept_sha256": hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()}


def data_settings(recipe: Recipe, digest: str) -> dict[str, Any]:
    """Return the settings that documents depend on: the data section without their arrangement, the source's hash."""
    section = recipe.data.model_dump(mode="json", exclude={"packing", "workers", "cache"})
    section["validation"] = {"source": section["validation"]["source"]}
    return section | {"digest": digest}


def what_differs(cached: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Return the first data setting that differs from when the cache was made, in words; empty if none does."""
    for name, value in cached.items():
        if now.get(name) != value:
            return f"data.{name} was {value!r} when the cache was made and is {now.get(name)!r} here"
    return ""
