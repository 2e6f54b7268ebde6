"""Custom loss terms (plugins): `distill run recipe.yaml --plugin my_losses.py`.

    # my_losses.py
    def hinge(student_logits, teacher_logits, labels):          # fp32 [n, V], fp32 [n, V], int64 [n]
        gap = (teacher_logits.log_softmax(-1) - student_logits.log_softmax(-1)).clamp_min(0)
        return gap.sum(-1)                                       # [n]

    TERMS = {"hinge": hinge}

    # recipe.yaml
    loss: {terms: [{type: forward_kl, weight: 0.5}, {type: hinge, weight: 0.5}]}

The functions get the models' logits (scale and soft cap applied, no temperature, cut to the shared vocabulary) in
chunks of rows, so that the logits of a batch never exist together; autograd computes their gradients chunk by chunk.
They are summed with the recipe's other terms, over the same tokens and divided by the same count.

The file may have the function of `loss.token_weights` (token_weights.py) in place of terms or beside them.

`--plugin` is the only way that a run executes code of its user: a recipe alone never does. The file's hash, and
that of each module that it imports from its own folder, is part of the resolved recipe, so that a run is not resumed
with other code.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from distill.core.diff_settings import diff_settings
from distill.core.imported_files import hash_imported_files
from distill.core.labels import IGNORE_INDEX
from distill.models.head import HeadWeights
from distill.objectives.targets import HeadForward
from distill.objectives.term_loss import TermLoss
from distill.objectives.token_weights import TokenWeighting, WeightFunction, array_names
from distill.recipe.data import OnPolicy
from distill.recipe.evaluation import Task
from distill.recipe.loss import Loss, PluginTerm, TokenWeights
from distill.recipe.reward import reward_of

RowLosses = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class PluginTermLoss(TermLoss):
    """A term that is a function of logits.

    Args:
        functions: The plugin's, by name.
        term, arguments: See `TermLoss`.
    """

    term: PluginTerm

    def __init__(self, functions: Mapping[str, RowLosses], term: PluginTerm, *arguments: Any) -> None:
        super().__init__(term, *arguments)
        self.function = functions[term.function]

    @property
    def name(self) -> str:
        return self.term.function

    def reduced(self, call: HeadForward, teacher: HeadWeights | None) -> torch.Tensor:
        return self.chunked(call, self._row_losses, call.labels, teacher)

    def _row_losses(self, raw: torch.Tensor, teacher_raw: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the function's losses of logits before scale and soft cap, 0 where no token is trained."""
        losses = self.function(self.alignment.student.applied(raw), self.transform.applied(teacher_raw), labels)
        return torch.where(labels == IGNORE_INDEX, 0.0, losses)


class Plugin(NamedTuple):
    """Contents of a plugin's file: its loss functions by name, its code and the SHA-256 of the code.

    Attributes:
        token_weights: Function of the tokens' weights; None where the recipe names none.
    """

    terms: dict[str, RowLosses]
    sha256: str
    code: bytes = b""
    token_weights: WeightFunction | None = None


def load_plugin(path: Path, *, terms: bool = True, token_weights: str | None = None) -> Plugin:
    """Run a plugin's file and take its `TERMS` and the function of token weights.

    Args:
        terms: Whether the recipe has terms of the file.
        token_weights: Name of the function of token weights; None for none.

    Raises:
        ValueError: it cannot be read, raises, or has no such dict of functions or function.
    """
    code = _read(path)
    module = types.ModuleType("distill_plugin")
    module.__file__ = str(path)
    try:
        exec(compile(code, str(path), "exec"), module.__dict__)
    except Exception as error:  # whatever the user's own code raises
        raise ValueError(f"--plugin {path}: {type(error).__name__}: {error}") from error
    functions = _terms_of(module, path) if terms else {}
    weights = None if token_weights is None else _weights_of(module, token_weights, path)
    return Plugin(functions, hashlib.sha256(code).hexdigest(), code, weights)


def _read(path: Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"--plugin {path}: cannot be read: {error.strerror}") from None


def _terms_of(module: types.ModuleType, path: Path) -> dict[str, RowLosses]:
    terms = getattr(module, "TERMS", None)
    if (
        not isinstance(terms, dict)
        or not terms
        or not all(isinstance(n, str) and callable(f) for n, f in terms.items())
    ):
        raise ValueError(
            f"--plugin {path}: expected TERMS, a dict of functions by name, as in TERMS = {{'mine': mine}}"
        )
    for name, function in terms.items():
        try:
            inspect.signature(function).bind(None, None, None)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"--plugin {path}: {name}: expected a function of three, (student_logits, teacher_logits, labels), "
                f"got one that cannot be called so: {error}"
            ) from None
    return {name: _explained(function, name, path) for name, function in terms.items()}


def _weights_of(module: types.ModuleType, name: str, path: Path) -> WeightFunction:
    """Return the function of token weights, with its exceptions turned into one line that names the file's line."""
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"loss.token_weights: expected a function {name} in {path}, got none")
    try:
        array_names(function)
    except (TypeError, ValueError) as error:
        raise ValueError(f"loss.token_weights: {path}: {name}: {error}") from None

    @functools.wraps(function)
    def call(**arrays: torch.Tensor) -> torch.Tensor:
        try:
            weights: torch.Tensor = function(**arrays)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the user's own code raises
            raise ValueError(f"--plugin {path}{_line(error, path)}: {name}: {_reason(error)}") from error
        return weights

    return call


def _line(error: BaseException, path: Path) -> str:
    """Return the last line of the file that an exception has gone through, as text."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f", line {lines[-1]}" if lines else ""


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _explained(function: RowLosses, name: str, path: Path) -> RowLosses:
    """Return `function` with its exceptions turned into one line that names it and the line of the file."""

    @functools.wraps(function)
    def call(student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = f"logits [{student.shape[0]}, {student.shape[1]}]"
        try:
            losses = function(student, teacher, labels)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the user's own code raises
            raise ValueError(f"--plugin {path}{_line(error, path)}: {name} with {rows}: {_reason(error)}") from error
        if not isinstance(losses, torch.Tensor) or losses.shape != student.shape[:1]:
            shape = list(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise ValueError(
                f"--plugin {path}: {name} with {rows}: expected a loss a row, a tensor of [{len(student)}], got {shape}"
            )
        return losses

    return call


def require_arrays(section: TokenWeights | None, function: WeightFunction, has_rewards: bool, samples: bool) -> None:
    """Raise ValueError where a function of token weights reads what the recipe's run does not have."""
    weighting = TokenWeighting(section, function)
    for names, is_there, needed in (
        (
            ("reward", "advantage"),
            has_rewards,
            "a policy_gradient term of weight above 0 with a reward (loss.terms), or data.on_policy.reward",
        ),
        (("sampled_log_p",), samples, "tokens that the student sampled (data.on_policy)"),
    ):
        missing = [name for name in names if name in weighting.names]
        if missing and not is_there:
            raise ValueError(
                f"loss.token_weights: {weighting.section.function} reads {' and '.join(missing)}: expected {needed}, "
                "got a recipe without"
            )


def allowed_plugin(
    loss: Loss, path: Path | None, on_policy: OnPolicy | None = None, tasks: Sequence[Task] = ()
) -> Plugin | None:
    """Return the plugin that a recipe needs, read only where `--plugin` allows it. Its file is run where a term or
    token weights come from it, and for a reward, an environment or a checker by the processes that call the function.

    Args:
        loss: the recipe's, whose `plugin` is the file that it was resolved with.
        path: the file that `--plugin` names.
        on_policy: the recipe's `data.on_policy`, which may have an environment.
        tasks: the recipe's `eval.tasks`, which may have checkers.

    Raises:
        ValueError: a recipe with code in it and no `--plugin`, another file, or a term that the file does not define.
    """
    named = []
    reward = reward_of(loss, on_policy)
    if reward is not None:
        where = "loss.terms: the reward" if loss.rewarded is not None else f"{reward.field}:"
        named.append((f"{where} {reward.function}", reward.file))
    weights = loss.token_weights
    if weights is not None and weights.function is not None:
        named.append((f"loss.token_weights: {weights.function}", weights.function_file))
    if on_policy is not None and on_policy.environment is not None:
        named.append((f"data.on_policy.environment: {on_policy.environment}", on_policy.environment_file))
    for number, task in enumerate(tasks):
        if task.checker_file is not None:
            named.append((f"eval.tasks.{number}.checker: {task.checker}", task.checker_file))
    for function, file in named:
        if path is None or Path(path).resolve() != Path(file).resolve():
            raise ValueError(
                f"{function} runs code; allow it with --plugin {file}"
                + ("" if path is None else f", got --plugin {path}")
            )
    if loss.plugin is None:
        if path is not None:
            raise ValueError(f"--plugin {path}: the recipe was not resolved with it")
        return None
    if path is None:
        raise ValueError(
            f"loss.plugin: this recipe runs code, from {loss.plugin.file}; allow it with --plugin {loss.plugin.file}"
        )
    terms = loss.runs_terms or not named
    if terms or loss.weighs_by_function:
        weight_function = None
        if weights is not None and weights.function is not None:
            weight_function = weights.function.rpartition(":")[2]
        plugin = load_plugin(path, terms=terms, token_weights=weight_function)
    else:  # of a reward or an environment alone, which other processes run
        code = _read(path)
        plugin = Plugin({}, hashlib.sha256(code).hexdigest(), code)
    if plugin.sha256 != loss.plugin.sha256:
        raise ValueError(f"--plugin {path}: expected the file with SHA-256 {loss.plugin.sha256}, got {plugin.sha256}")
    for module, was, now in diff_settings(loss.plugin.modules, hash_imported_files(Path(path), plugin.code)):
        raise ValueError(
            f"--plugin {path}: it imports {module} from its folder: expected the file with SHA-256 {was}, got {now}"
        )
    for term in loss.terms:
        if isinstance(term, PluginTerm) and term.function not in plugin.terms:
            raise ValueError(
                f"loss.terms: expected a built-in type or a function of {path} ({', '.join(sorted(plugin.terms))}), "
                f"got {term.function!r}"
            )
    if plugin.token_weights is not None:
        require_arrays(weights, plugin.token_weights, reward is not None, on_policy is not None)
    return plugin
