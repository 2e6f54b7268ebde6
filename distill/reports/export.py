"""`distill export`: write a run's student to a folder that is verified before it gets its name."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from distill.core.errors import RecipeError, first_line
from distill.core.files import atomic_folder, write_text
from distill.core.finished_run import student_error
from distill.core.folders import RECIPE_FILE, check_new_folder
from distill.evaluation.targets import CONFIGS, load_merged, target_from_model
from distill.models.adapters import is_adapter, merge_in_place
from distill.models.load.fingerprint import model_identity
from distill.models.load.read_weights import read_weights
from distill.models.precision.quantised_formats import read_saved
from distill.recipe import Recipe, load
from distill.reports.gguf_file import write_gguf
from distill.reports.model_card import merged_card
from distill.reports.packed_folder import pack_folder
from distill.teachers.load_context import load_context
from distill.teachers.opening import opened_pair
from distill.teachers.registry import source_of
from distill.training.checkpoints import STATE, checkpoint_error, checkpoints, load_weights
from distill.training.lock_file import LOCK_FILE, read_lock

DTYPES = ("float32", "bfloat16", "float16")


def export(
    folder: Path,
    destination: Path,
    *,
    dtype: str | None = None,
    shard_size: str = "5GB",
    gguf: str | None = None,
    packed: bool = False,
) -> dict[str, Any]:
    """Write the student of the run or checkpoint in `folder`, or the model there, to `destination`.

    A run merges a LoRA student when it saves it; an adapter alone is merged here, in the dtype of its base model's
    files, or of a quantised student as it was rounded in training. Weights are sharded safetensors; tokenizer,
    generation configuration, model card and recipe are copied. The result is loaded again and must hold the same
    weights, rounded to `dtype`.

    Args:
        folder: Folder of the run or checkpoint, or of a model such as `distill quantise` writes.
        destination: Folder that does not exist or is empty.
        dtype: float32, bfloat16 or float16; None for that of the training.
        shard_size: Maximum size of a file, as in transformers ("5GB").
        gguf: Also write a GGUF file of this type.
        packed: Pack a quantised student's weights as compressed-tensors.

    Returns:
        `folder`, `dtype`, `parameters`, `bytes` and `files` of the export; with `gguf` also the result of `write_gguf`,
        with `packed` that of `pack_folder`.

    Raises:
        RecipeError: There is no student, it is not as it was saved, the destination is in use, or `dtype` cannot hold
            the values.
    """
    source = folder / "student"
    run = folder
    if (folder / STATE).is_file():
        source = folder
        run = folder.parent
        fault = checkpoint_error(folder)
        if fault:
            raise RecipeError([f"{folder}: {fault}"])
    elif _holds_model(folder) and not _holds_model(source):
        source = folder
    elif not _holds_model(source):
        last = next((f", or export the checkpoint {path}" for path in checkpoints(folder)[-1:]), "")
        raise RecipeError([f"{folder}: this run has no student yet; distill run ... --resume finishes it{last}"])
    elif error := student_error(folder):
        raise RecipeError([f"{folder}: {error}; restore the file, or export a checkpoint of the run"])
    if dtype is not None and dtype not in DTYPES:
        raise RecipeError([f"--dtype: expected one of {', '.join(DTYPES)}; got {dtype!r}"])
    if not re.fullmatch(r"\d+(\.\d+)? ?[KMGT]B", shard_size, re.IGNORECASE):
        raise RecipeError([f"--shard-size: expected a size such as 5GB or 500MB, got {shard_size!r}"])
    try:
        trained = read_saved(source)
    except ValueError as error:
        raise RecipeError([str(error)]) from error
    if trained and dtype not in (None, "float32"):
        raise RecipeError(
            [f"--dtype: a quantised student's weights are its file's in float32; leave it out; got {dtype}"]
        )
    check_new_folder(destination, "--output")
    try:
        model: Any = _model_of(source, run, torch.float32 if trained else None).eval()
        model.config.use_cache = True
    except ValueError as error:
        raise RecipeError([str(error)]) from error
    if dtype is not None:
        model = model.to(getattr(torch, dtype))
        for name, tensor in model.named_parameters():
            if not torch.isfinite(tensor).all():
                raise RecipeError([f"--dtype: {name} holds values that {dtype} cannot represent; use bfloat16"])
    more: dict[str, Any] = {}
    try:
        with atomic_folder(destination) as unfinished:
            model.save_pretrained(unfinished, max_shard_size=shard_size)
            if (source / "tokenizer_config.json").is_file():
                AutoTokenizer.from_pretrained(source).save_pretrained(unfinished)
            if (source / "README.md").is_file():
                write_text(unfinished / "README.md", merged_card((source / "README.md").read_text(encoding="utf-8")))
            if (run / RECIPE_FILE).is_file():
                shutil.copy(run / RECIPE_FILE, unfinished / RECIPE_FILE)
            _check(model, unfinished)
            if trained:
                trained._replace(codes=None).write(unfinished)  # of whole weights
            if gguf is not None:
                name = f"{destination.name}-{gguf}.gguf"
                more["gguf"] = write_gguf(unfinished, unfinished / name, gguf)._replace(path=str(destination / name))
            if packed:
                more["packed"] = pack_folder(unfinished, shard_size)
    except OSError:
        check_new_folder(destination, "--output")  # whether another export took the name
        raise
    files = sorted(path.name for path in destination.iterdir())
    return more | {
        "folder": str(destination),
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": sum((destination / name).stat().st_size for name in files),
        "files": files,
    }


def _model_of(source: Path, run: Path, dtype: torch.dtype | None) -> PreTrainedModel:
    """Return the model of a folder on the CPU, with its adapter merged.

    Args:
        source: Folder of the student, or the checkpoint.
        run: Folder of its run; of a model that is of no run, its own.
        dtype: Dtype of the weights; None for that of their files.
    """
    recipe = load(run / RECIPE_FILE) if is_adapter(source) and (run / RECIPE_FILE).is_file() else None
    if recipe is not None and not recipe.student.starts_as_named:
        return _rebuilt(source, run, recipe)
    return load_merged(target_from_model(str(source), recipe), "cpu", dtype)


def _rebuilt(checkpoint: Path, run: Path, recipe: Recipe) -> PreTrainedModel:
    """Return the student of a LoRA checkpoint whose base model is in no files: made again as the run made it.

    Raises:
        ValueError: What the run made it of, such as the teacher or the data, has changed since.
    """
    source = source_of(recipe)
    vocabulary = source.vocabulary()
    calibrated = recipe.student.cut is not None and recipe.student.cut.is_calibrated
    splits = vocabulary.read(recipe.data, recipe.train.seed) if calibrated else None
    with opened_pair(source, vocabulary, load_context(recipe, splits)) as pair:
        began = read_lock(run / LOCK_FILE)["student"]["weights"]
        made = model_identity(pair.student)["weights"]
        if made != began:
            raise ValueError(
                f"{checkpoint}: its base model, made again from {run / RECIPE_FILE}, has the hash {made}, expected "
                f"{began} of {run / LOCK_FILE}: the teacher, the data or the device differ from the run's; "
                "distill run ... --resume finishes the run, whose student is whole"
            )
        load_weights(pair.student, checkpoint)
        plain: Any = merge_in_place(pair.student)
    plain = plain.to("cpu")
    rounded = read_saved(checkpoint)
    if rounded is not None:
        rounded.restore_values(plain)
    return plain


def _holds_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in CONFIGS)


def _check(model: Any, folder: Path) -> None:
    """Check that the written weights equal the model's."""
    again = read_weights(AutoModelForCausalLM, folder, "--output", dtype="auto", use_safetensors=True)
    written = dict(again.named_parameters())
    for name, tensor in model.named_parameters():
        assert written[name].dtype == tensor.dtype and torch.equal(written[name], tensor), name
    assert again.config.get_text_config().num_hidden_layers  # resolves the configuration's own attribute name


def check_repository(name: str) -> None:
    """Raise for a name that is not a valid repository of the hub."""
    if not re.fullmatch(r"[A-Za-z0-9][\w-]*/[A-Za-z0-9]([\w.-]*[A-Za-z0-9_])?", name) or ".." in name or "--" in name:
        raise RecipeError([f"--push: expected OWNER/NAME, got {name!r}"])


def push(folder: Path, repository: str, *, private: bool = True) -> str:
    """Upload an exported folder to the hub; returns its address.

    Raises:
        RecipeError: The hub refused it, or cannot be reached; the folder is kept.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    again = f"; {folder} is written; push it again with: hf upload {repository} {folder}"
    # errors of the hub's HTTP library, whichever it is: they are base classes of the hub's own error
    unreachable: tuple[type[BaseException], ...] = tuple(
        kind for kind in HfHubHTTPError.__mro__[1:] if kind not in (Exception, BaseException, object)
    )
    try:
        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repository, folder_path=str(folder)))
    except (HfHubHTTPError, HFValidationError, ValueError) as error:
        raise RecipeError([f"--push: {repository}: {first_line(error)} (hf auth login logs in){again}"]) from error
    except unreachable as error:
        raise RecipeError([f"--push: {repository}: the hub cannot be reached ({first_line(error)}){again}"]) from error
