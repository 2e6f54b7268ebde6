"""LoRA adapters (Hu et al., 2021) through PEFT: putting them on a student, merging them into a model."""

from __future__ import annotations

import copy
import difflib
import logging
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from distill.models.dtypes import is_in_4_bits
from distill.models.head import find_head
from distill.models.load.config_validation import read_json
from distill.models.precision.nf4 import dense_adapters
from distill.models.precision.quantised_formats import CODES_FILE, FORMAT_FILE, SCALES_FILE, read_saved
from distill.recipe import Lora

log = logging.getLogger(__name__)


def add_lora(model: PreTrainedModel, lora: Lora, *, seed: int | None = None) -> Any:
    """Put trainable adapters on `model`; its own weights stop training.

    Args:
        model: The student.
        lora: `targets` are last or full parts of module names, or `all-linear` for every linear layer but the head;
            `head: true` adds the head, also where it is tied to the embedding.
        seed: Seed of the initial A, independent of earlier random numbers, so that every process draws the same; None
            for PyTorch's generator in its present state.

    Returns:
        A `peft.PeftModel`.

    Raises:
        ValueError: a target that matches no linear layer; lists those there are.
    """
    from peft import LoraConfig, TaskType, get_peft_model

    known: dict[str, list[str]] = {}  # full names of linear layers, by the last part (`q_proj`); the head's too
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            known.setdefault(name.rpartition(".")[2], []).append(name)
    found = find_head(model)
    head = next(name for name, module in model.named_modules() if module is found.module)
    targets = [lora.targets] if isinstance(lora.targets, str) else list(lora.targets)
    if targets == ["all-linear"]:
        modules = [name for names in known.values() for name in names if name != head]
    else:
        modules = _matching(targets, known)
    if lora.head and head not in modules:
        modules.append(head)
    if head in modules and lora.dropout > 0:
        raise ValueError(f"student.lora.dropout: expected 0 where the head has an adapter, got {lora.dropout}")
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=_shortest(modules, known),
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        # nothing is computed from weights that have no memory
        init_lora_weights="pissa" if lora.init == "pissa" and not found.linear.weight.is_meta else True,
        bias="none",
        task_type=TaskType.CAUSAL_LM,
    )
    devices = {p.device.index for p in model.parameters() if p.is_cuda} if seed is not None else ()
    with torch.random.fork_rng(devices, enabled=seed is not None), warnings.catch_warnings():
        if seed is not None:
            torch.manual_seed(seed)
        warnings.simplefilter("ignore", FutureWarning)  # PEFT reads a property that transformers has renamed
        return get_peft_model(model, config)


def _matching(targets: Sequence[str], known: dict[str, list[str]]) -> list[str]:
    full = [name for names in known.values() for name in names]
    modules: list[str] = []
    for target in targets:
        matched = [name for name in full if name == target or name.endswith("." + target)]
        if not matched:
            near = difflib.get_close_matches(target, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"student.lora.targets: {target!r} matches no linear layer; {hint}there are {', '.join(sorted(known))}"
            )
        modules += [name for name in matched if name not in modules]
    return modules


def _shortest(modules: Sequence[str], known: dict[str, list[str]]) -> list[str]:
    """Last parts of names where they say the same, so that adapter_config.json is short; full names elsewhere."""
    chosen = set(modules)
    short = [name for name, full in known.items() if chosen.issuperset(full)]
    covered = {name for part in short for name in known[part]}
    return sorted(short) + sorted(chosen - covered)


def merged(model: Any) -> PreTrainedModel:
    """A plain model with the adapters of `model` (a `PeftModel`) added to its weights; `model` stays as it is.

    Base weights in 4 bits are dequantised for that, and the result is on the CPU.

    An adapter on one side of a tied pair (head and embedding) would change both: the copy is untied first, and its
    configuration says so.

    Raises:
        ValueError: where adapters hold NaN or infinity.
    """
    return merge_in_place(copy.deepcopy(model))


def merge_in_place(model: Any) -> PreTrainedModel:
    """Merge the adapters into `model` itself, as `merged` does for a copy."""
    if is_in_4_bits(model):
        model = dense_adapters(model)
    plain = model.get_base_model()
    head = find_head(plain).linear
    own = plain.get_input_embeddings()
    embedding = own.get_base_layer() if hasattr(own, "lora_A") else getattr(own, "original_module", own)
    adapted = any(
        hasattr(module, part)
        for module in (plain.get_output_embeddings(), plain.get_input_embeddings())
        for part in ("lora_A", "modules_to_save")
    )
    if adapted and head.weight is embedding.weight:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
    with torch.no_grad(), warnings.catch_warnings():
        # those of a quantised student
        warnings.filterwarnings("ignore", message="All adapters are already merged")
        plain = model.merge_and_unload(safe_merge=True)
    if adapted:
        tied = plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
        for config in (plain.config, plain.config.get_text_config()):
            config.tie_word_embeddings = tied
        if not tied and hasattr(plain, "all_tied_weights_keys"):
            # what transformers 5 ties by when it saves and loads
            plain.all_tied_weights_keys = {}
    return plain


def save_adapter(model: Any, folder: Path) -> None:
    """Write the adapter of a `PeftModel`; a base model on this machine by its whole path, one of the hub by its commit.

    `AutoPeftModelForCausalLM.from_pretrained(folder)` then finds the base from anywhere.
    """
    config = model.peft_config[model.active_adapter]
    base = model.get_base_model()
    name = config.base_model_name_or_path
    if name and Path(name).exists():
        config.base_model_name_or_path = str(Path(name).resolve())
    if name:  # the commit of a teacher that the student was cut from is not the student's
        config.revision = config.revision or getattr(base.config, "_commit_hash", None)
    model.save_pretrained(folder)


def is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").exists()


def base_of(folder: Path) -> dict[str, str | None]:
    """`model` and `revision` of the base that the adapter in `folder` names; empty where it holds no adapter alone.

    Raises:
        ValueError: it names none.
    """
    if not is_adapter(folder):
        return {}
    values = read_json(folder / "adapter_config.json", "student")
    name = values.get("base_model_name_or_path")
    if name in (None, "", "None"):
        raise ValueError(
            f"student: {folder / 'adapter_config.json'} names no base model: expected base_model_name_or_path, got "
            f"{name!r}, as of a student that was cut or drawn in its run; distill export writes a run, or a checkpoint "
            "of it, as a whole model"
        )
    revision = values.get("revision")
    if not isinstance(name, str) or not name or not isinstance(revision, str | None):
        raise ValueError(
            f"student: expected base_model_name_or_path, and a revision or null, in {folder / 'adapter_config.json'}; "
            f"got {name!r} and {revision!r}"
        )
    return {"model": name, "revision": revision}


def load_and_merge(model: PreTrainedModel, adapter: str, field: str = "teacher.adapter") -> PreTrainedModel:
    """Merge a saved LoRA into `model`; one of a quantised student is merged as it was rounded in training.

    Args:
        model: Base model of the adapter; consumed.
        adapter: A folder with adapter_config.json and adapter_model.safetensors, or a hub id. Pickles are not read.
        field: Field of the recipe, for errors.

    Raises:
        ValueError: no adapter there, one of another kind, or one made for another model.
    """
    folder = _adapter_folder(adapter, field)
    rounded = read_saved(folder)
    with_adapter = _load_adapter(model, folder, adapter, field)
    log.info("%s: merged %s (rank %s)", field, adapter, with_adapter.peft_config[with_adapter.active_adapter].r)
    plain = merge_in_place(with_adapter)
    if rounded is not None:
        rounded.restore_values(plain)
    return plain


def load_beside(model: PreTrainedModel, adapter: str, field: str = "teacher.adapter") -> PreTrainedModel:
    """Put a saved LoRA beside the weights of `model`, which stay as they are; arguments and errors of `load_and_merge`.

    Returns:
        `model`, whose adapted layers are PEFT's.
    """
    folder = _adapter_folder(adapter, field)
    if read_saved(folder) is not None:
        raise ValueError(
            f"{field}: {adapter} is that of a quantised student, whose merged weights are rounded; expected "
            "merge_adapter: true, got false"
        )
    return _load_adapter(model, folder, adapter, field).get_base_model()


def adapter_parameters(adapter: str) -> int:
    """Return the number of parameters of a saved LoRA; 0 for one that is not on this machine."""
    file = Path(adapter).expanduser() / "adapter_model.safetensors"
    if not file.is_file():
        return 0
    with safe_open(str(file), framework="pt") as tensors:
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118


def _load_adapter(model: PreTrainedModel, folder: Path, adapter: str, field: str) -> Any:
    """Return a `PeftModel` of `model` and the adapter in a folder, all of whose weights have their place."""
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict

    config = PeftConfig.from_pretrained(str(folder))
    if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
        raise ValueError(f"{field}: expected a LoRA adapter, got {config.peft_type}")
    try:
        with_adapter = PeftModel.from_pretrained(model, str(folder))
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{field}: {adapter} does not fit its base model: {reason}") from error
    with safe_open(str(folder / "adapter_model.safetensors"), framework="pt") as file:
        saved = set(file.keys())
    wrong = saved ^ set(get_peft_model_state_dict(with_adapter))
    if wrong:
        raise ValueError(
            f"{field}: {adapter} does not fit its base model: {len(wrong)} weights have no counterpart, "
            f"such as {sorted(wrong)[0]}"
        )
    return with_adapter


def _adapter_folder(adapter: str, field: str) -> Path:
    needed = ("adapter_config.json", "adapter_model.safetensors")
    folder = Path(adapter).expanduser()
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        patterns = [*needed, FORMAT_FILE, SCALES_FILE, CODES_FILE]
        try:
            folder = Path(snapshot_download(adapter, allow_patterns=patterns))
        except (OSError, HfHubHTTPError, HFValidationError) as error:
            raise ValueError(
                f"{field}: {adapter} is neither a folder nor a hub id that can be reached; give a local folder"
            ) from error
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{field}: {adapter} has no {' and no '.join(missing)}")
    return folder
