"""`lock.yaml`: everything that a run's metrics depend on, written with them and compared with a second run.

    text = to_yaml(build_lock(recipe, ...))
    check_same(read_lock(path), now)     # ValueError names the first thing that differs

It holds the resolved recipe, versions of the libraries, fingerprints of both models' weights, hashes of the tokenizer
and of the tokenised data, the chat template with its fixed date, seeds, attention back ends, the GPU and the number of
processes. The chunk size of the loss follows from these (versions, shapes, GPU).

It is made at every start, so it must be cheap at any size: `fingerprint` reads every byte of the weights, on their
device, with integer sums at memory speed (measured: CPU 7 GB/s a core, SHA-256 1.6).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from distill.core.diff_settings import diff_settings
from distill.core.environment import environment
from distill.core.errors import RecipeError, first_line, quote
from distill.models.load.fingerprint import model_identity
from distill.models.loading import STUDENT_SEED, TEACHER_SEED
from distill.models.patch.attention import BACKENDS
from distill.recipe import Recipe, parse
from distill.recipe.teacher_config import every_field
from distill.recipe.yaml_text import parse_yaml, to_yaml
from distill.teachers.base import Teacher

if TYPE_CHECKING:
    from distill.data.load import Splits
    from distill.teachers.vocabulary import Vocabulary

log = logging.getLogger(__name__)

Plain = dict[str, Any]  # as YAML holds it
LOCK_FILE = "lock.yaml"
FIRST = ("recipe", "data", "teacher", "student", "seeds", "processes", "environment")


def build_lock(
    recipe: Recipe,
    *,
    teacher: Teacher,
    student: nn.Module,
    vocabulary: Vocabulary,
    splits: Splits,
    processes: int,
) -> Plain:
    """Return everything that the run depends on, as plain data.

    Args:
        teacher: Loaded teacher, its attention back end chosen; likewise `student`, before training.
        vocabulary: Tokenizer and chat template of the data.
        splits: Training and held-out rows.
    """
    seed = recipe.train.seed
    return {
        "recipe": locked_recipe(recipe),
        "data": locked_data(recipe, splits, vocabulary),
        "teacher": teacher.fingerprint(),
        "student": model_identity(student),
        "seeds": {
            "init": {"teacher": TEACHER_SEED, "student": STUDENT_SEED, "adapters": seed},
            "data": seed,
            "dropout": seed,
            "sampling": "greedy",
        },
        "processes": processes,
        "environment": environment(),
    }


def locked_data(recipe: Recipe, splits: Splits, vocabulary: Vocabulary) -> Plain:
    """Return what a lock file holds of the data: hashes of source, tokenised rows, tokenizer, and the template.

    The source's hash is that of its content, or a hub data set's fingerprint; held-out rows are named by their source.
    """
    held_out = recipe.data.validation.source or "rows_sha256"
    sets = {name: hash_rows(rows) for name, rows in splits.sets.items()}
    return {
        "source": splits.report.digest,
        "rows_sha256": hash_rows(splits.train),
        "validation": {held_out: hash_rows(splits.validation), **sets},
        **_text_to_tokens(vocabulary),
    }


def hash_rows(rows: Iterable[Mapping[str, object]]) -> str:
    """Return the SHA-256 of token ids, labels and positions, in order.

    An Arrow data set is read column by column; other rows one by one, with the same hash.
    """
    digests = {name: (hashlib.sha256(), hashlib.sha256()) for name in ("input_ids", "labels", "position_ids")}
    for columns in _columns(rows, tuple(digests)):
        for (lengths, values), column in zip(digests.values(), columns, strict=True):
            # lengths apart from values: a token that moved over a row's end changes the hash; fixed widths, for any
            # machine
            lengths.update(column[0].astype("<i8").tobytes())
            values.update(column[1].astype("<i4").tobytes())
    return hashlib.sha256(b"".join(part.digest() for pair in digests.values() for part in pair)).hexdigest()


def _columns(rows: Any, names: tuple[str, ...]) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
    """Yield lengths and values of each column, some thousand rows at a time."""
    if hasattr(rows, "with_format"):
        for table in rows.with_format("arrow").iter(batch_size=4096):
            columns = [table.column(name).combine_chunks() for name in names]
            yield [(column.value_lengths().to_numpy(), column.flatten().to_numpy()) for column in columns]
        return
    for row in rows:
        yield [(np.array([len(row[name])]), np.array(row[name], dtype=np.int32)) for name in names]


def _text_to_tokens(vocabulary: Vocabulary) -> Plain:
    """Return hashes of the tokenizer and the chat template in use, with the fixed date that replaces today's."""
    tokenizer = vocabulary.tokenizer
    template = vocabulary.template
    if tokenizer is None:
        return {"tokenizer_sha256": None, "chat_template": None, "chat_template_date": None}
    words = "\n".join(f"{number} {token}" for token, number in sorted(tokenizer.get_vocab().items()))
    return {
        "tokenizer_sha256": hashlib.sha256(words.encode()).hexdigest(),
        "chat_template": template.source if template else None,
        **({"chat_template_kwargs": template.kwargs} if template and template.kwargs else {}),
        **({"chat_template_tool_use": template.tool_use.source} if template and template.tool_use else {}),
        "chat_template_date": str(template.frozen_date) if template and template.frozen_date else None,
    }


def read_lock(path: Path) -> Plain:
    """Read a lock file.

    Raises:
        RecipeError: It does not exist, or is not a lock file.
    """
    try:
        lock = parse_yaml(path.read_text(encoding="utf-8"), f"--lock {path}")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise RecipeError([f"--lock {path}: cannot be read: {reason}"]) from None
    if not set(FIRST) <= lock.keys():
        raise RecipeError([f"--lock {path}: expected a lock.yaml written by a run"])
    with contextlib.suppress(RecipeError):  # settings added in later versions get their defaults
        lock["recipe"] = locked_recipe(parse(to_yaml(lock["recipe"])))
    return lock


def locked_recipe(recipe: Recipe) -> Plain:
    """Return the part of a recipe that a lock file holds: all but the name and folder of the run.

    A teacher has the fields of every type, as in recipe.yaml and in the locks of earlier runs, so that a setting is
    never compared with its absence.
    """
    tree = recipe.model_dump(mode="json", exclude={"name", "output_dir"})
    tree["teacher"] = every_field(tree["teacher"])
    tree["teachers"] = [every_field(teacher) for teacher in tree["teachers"]]
    return tree


def locked_attention(lock: Mapping[str, Any] | None, path: str) -> Plain:
    """Return the attention back ends of a lock for `AttentionChoices`: they are used instead of timed again.

    Raises:
        RecipeError: An unknown back end.
    """
    backends = (lock or {}).get("attention") or {}
    if not isinstance(backends, Mapping) or any(name not in BACKENDS for name in backends.values()):
        raise RecipeError([f"--lock {path}: attention: expected back ends of {', '.join(BACKENDS)}; got {backends}"])
    return {role: {"backend": name} for role, name in backends.items()}


def check_same(locked: Mapping[str, object], now: Mapping[str, object], origin: str) -> None:
    """Check that a run matches a lock.

    Raises:
        RecipeError: Something differs; the message names the first difference, the locked and the present value.
    """
    imposed = {key: value for key, value in locked.items() if key != "attention"}  # see `locked_attention`
    for name, old, new in diff_settings(imposed, now):
        raise RecipeError([f"{origin}: {name} differs: locked {quote(old)}, here {quote(new)}"])


def check_same_teachers(locks: Iterable[Path], now: Mapping[str, Any]) -> None:
    """Check that the teacher of a stage has the weights that it had in the earlier stages with the same settings.

    Args:
        locks: Lock files of the earlier stages.
        now: Content of this stage's lock file.

    Raises:
        ValueError: Something differs; the message names the first difference.
    """
    for path in locks:
        before = read_lock(path)
        if all(before["recipe"].get(name) == now["recipe"].get(name) for name in ("teacher", "teachers", "parallel")):
            was = {"teacher": _without_attention(before["teacher"])}
            check_same(was, {"teacher": _without_attention(now["teacher"])}, f"{path} of an earlier stage")


def _without_attention(identity: Any) -> Any:
    """Return a fingerprint without the attention back ends of its models, at any depth."""
    if not isinstance(identity, Mapping):
        return identity
    return {name: _without_attention(value) for name, value in identity.items() if name != "attention"}


def check_same_run(before: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> None:
    """Check that a resumed run has the data and models that it began with; other versions are only logged.

    Args:
        now: The same for the loaded data and models.

    Raises:
        ValueError: Something differs; the message names the first difference.
    """
    origin = f"--resume: {path} (move it away to continue anyway)"
    moved = before["processes"] != now["processes"]
    for name in ("data", "teacher", "student", "seeds", *(["tasks"] if "tasks" in before else [])):
        was = before[name]
        present = now[name]
        if moved and name in ("teacher", "student"):
            # weights are hashed whole, however many ranks hold them; what attention they get may follow the layout
            was = _without_attention(was)
            present = _without_attention(present)
        check_same({name: was}, {name: present}, origin)
    for name, old, new in diff_settings({"environment": before["environment"]}, {"environment": now["environment"]}):
        log.warning("%s was %s when the run began and is %s now: metrics may differ in rounding", name, old, new)
