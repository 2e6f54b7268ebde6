"""`lock.yaml`: everything a run's figures depend on, written beside them, and held against a second run.

    text = to_yaml(lock_of(recipe, ...))
    require_same(read_lock(path), now)     # ValueError names the first thing that differs

What it holds: the recipe as resolved, versions of the libraries, the hashes of both models' configurations and
weights and of the tokenizer, the hash of the tokenised data, the chat template, seeds, attention back ends, the GPU
and the number of processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from distill.environment import environment
from distill.faults import RecipeError
from distill.models.head import bare
from distill.recipe import Recipe

LOCK_FILE = "lock.yaml"
FIRST = ("recipe", "data", "teacher", "student", "seeds", "processes", "environment")


def lock_of(
    recipe: Recipe, *, teacher: nn.Module, student: nn.Module, tokenizer: Any, rows: Iterable[Mapping[str, Any]],
    processes: int,
) -> dict[str, Any]:  # fmt: skip
    """Everything the run depends on, as plain data.

    Args:
        recipe: as resolved.
        teacher: as loaded; likewise `student`, before training.
        tokenizer: of the data; None for random tokens.
        rows: the tokenised training data.
        processes: of the run.
    """
    return {
        "recipe": recipe.model_dump(mode="json", exclude={"name"}),
        "data": {"rows_sha256": hash_of_rows(rows), **_tokenizer(tokenizer)},
        "teacher": _model(teacher),
        "student": _model(student),
        "seeds": {"init": recipe.train.seed, "data": recipe.train.seed, "sampling": "greedy"},
        "processes": processes,
        "environment": environment(),
    }


def hash_of_rows(rows: Iterable[Mapping[str, Any]]) -> str:
    """SHA-256 of the token ids, labels and positions, in order."""
    digest = hashlib.sha256()
    for row in rows:
        for name in ("input_ids", "labels", "position_ids"):
            values = torch.as_tensor(row[name], dtype=torch.int64)
            digest.update(f"{name} {len(values)} ".encode())
            digest.update(values.numpy().tobytes())
    return digest.hexdigest()


def hash_of_weights(model: nn.Module) -> str:
    """SHA-256 of every parameter's name, shape, dtype and bytes."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} ".encode())
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _model(model: Any) -> dict[str, Any]:
    config: Any = bare(model).config
    return {
        "weights_sha256": hash_of_weights(model),
        "commit": getattr(config, "_commit_hash", None),
        "attention": getattr(config, "_attn_implementation", None),
    }


def _tokenizer(tokenizer: Any) -> dict[str, Any]:
    if tokenizer is None:
        return {"tokenizer_sha256": None, "chat_template": None}
    words = "\n".join(f"{number} {token}" for token, number in sorted(tokenizer.get_vocab().items()))
    return {"tokenizer_sha256": hashlib.sha256(words.encode()).hexdigest(), "chat_template": tokenizer.chat_template}


def lock_text(lock: Mapping[str, Any]) -> str:
    """The lock as YAML."""
    return yaml.safe_dump(dict(lock), sort_keys=False, allow_unicode=True)


def read_lock(path: Path) -> dict[str, Any]:
    """A lock from its file.

    Raises:
        RecipeError: there is none, or it is not a lock.
    """
    try:
        lock = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise RecipeError([f"--lock {path}: cannot be read: {reason}"]) from None
    if not isinstance(lock, dict) or not set(FIRST) <= lock.keys():
        raise RecipeError([f"--lock {path}: expected a lock.yaml that a run has written"])
    return lock


def require_same(locked: Mapping[str, Any], now: Mapping[str, Any], origin: str) -> None:
    """Hold that a run is the one that is locked.

    Raises:
        RecipeError: naming the first thing that differs, what is locked and what is here.
    """
    for name, old, new in differences(locked, now):
        raise RecipeError([f"--lock {origin}: {name} differs: locked {_short(old)}, here {_short(new)}"])


def differences(locked: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Name, locked and present value of everything that differs, the recipe first."""
    for key in [*locked, *(key for key in now if key not in locked)]:
        old, new, name = locked.get(key), now.get(key), f"{prefix}{key}"
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{name}.")
        elif old != new:
            yield name, old, new


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:56] + "..."
