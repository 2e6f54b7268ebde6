"""Teacher and student as the recipe describes them: load, prune, adapt, save.

    teacher = load_teacher(recipe.teacher, device=device)
    student = load_student(recipe.student, teacher=teacher, device=device)
    save_student(student, tokenizer, run_folder / "student")

A loaded teacher is in eval mode and frozen. Neither model keeps a KV cache while training (`config.use_cache` is
False): with a cache, packed documents would attend to each other.
"""

from __future__ import annotations

import copy
import functools
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, cached_file

from distill.core.files import atomic_folder
from distill.models.adapters import add_lora, load_and_merge, load_beside, merged, save_adapter
from distill.models.dtypes import quantised_weights
from distill.models.layers import layer_count, layer_indices
from distill.models.load.config_validation import check_config, check_index, read_json
from distill.models.load.read_weights import read_weights
from distill.models.load.source import (
    ModelFiles,
    loading,
    remote_arguments,
    resolve_model_source,
    resolve_tokenizer_source,
    tokenizer_place,
)
from distill.models.patch.corrections import correct_forward
from distill.models.patch.swaps import is_patched
from distill.models.precision.nf4 import quantise_nf4, require_bitsandbytes
from distill.models.precision.offload import offload_layers
from distill.models.prune.importance import shape_for
from distill.models.prune.narrow import Selection, cut_parts
from distill.models.prune.pruning import cut_layers
from distill.models.quantised_checkpoints import (
    check_quantisation,
    check_quantised,
    int8_arguments,
    naming_the_quantisation,
    quantised_by_transformers,
)
from distill.models.routers import freeze_parts
from distill.recipe import FromTeacher, LoadedTeacherConfig, Lora, ModelSection, Student
from distill.recipe.models import EIGHT_BITS
from distill.recipe.shipped import find_architecture

log = logging.getLogger(__name__)

TEACHER_SEED = 0
STUDENT_SEED = 1
Once = Callable[[Callable[[], PreTrainedModel]], PreTrainedModel]


def each_time(load: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Call `load`: the checkpoint of a model that shares no weights is read for it alone."""
    return load()


def load_tokenizer(section: ModelSection, field: str = "teacher") -> PreTrainedTokenizerBase:
    """The tokenizer that comes with `section.model` (with `section.config` where `model` is not given).

    A tokenizer without a padding token pads with its end-of-sequence token.

    Raises:
        ValueError: there is none, or it cannot be reached.
    """
    spec = section.model or section.config
    if spec is None:
        raise ValueError(f"{field}.model: no tokenizer, since no model is named; data.source: synthetic needs none")
    source = resolve_tokenizer_source(spec, f"{field}.model")
    arguments = remote_arguments(section, field) | ({"gguf_file": source.gguf_file} if source.gguf_file else {})
    with loading(spec, source, f"{field}.model"), tokenizer_place(source) as place:
        tokenizer = AutoTokenizer.from_pretrained(place, **arguments)
        tokenizer.name_or_path = source.location
        # data.max_length is held to both models; the tokenizer's own limit would be warned of for each longer text
        tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
        tokenizer("One text, 2 numbers.\n")  # a broken one may panic when it is first used
    templates = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    hostile = next((name for name in templates if not re.fullmatch(r"[\w-][\w.-]*", str(name))), None)
    if hostile:
        raise ValueError(
            f"{field}.model: the tokenizer of {spec} has a chat template called {hostile!r}, which cannot be a file's "
            "name; rename it in tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(f"{field}.model: expected a padding or end-of-text token in {spec}'s tokenizer, got none")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def teacher_seed(section: ModelSection) -> int:
    """Return the seed of a teacher's random weights; the student's own checkpoint has the student's."""
    return STUDENT_SEED if getattr(section, "type", None) == "student" else TEACHER_SEED


def load_teacher(
    section: LoadedTeacherConfig,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    once: Once = each_time,
) -> PreTrainedModel:
    """The teacher on `device`: eval mode, no gradients, its adapter merged or beside the weights.

    With `section.offload` its layers stay in host memory and travel to `device` when they are called.

    Args:
        dtype: Overrules `section.dtype`; where that is `auto`, the checkpoint's, and for a GGUF file (whose blocks
            are expanded) float32 on the CPU and bfloat16 on a GPU.
        once: Calls the loader of the checkpoint, or returns a model over weights that are in memory.
    """
    device = torch.device(device)
    place = torch.device("cpu") if section.offload else device
    dtype = dtype or _named_dtype(section.dtype)
    merged_adapter = section.adapter if section.merge_adapter else None
    model = once(lambda: _load(section, "teacher", place, dtype, teacher_seed(section), merged_adapter))
    if section.adapter is not None and not section.merge_adapter:
        model = load_beside(model, section.adapter)
    model.config.use_cache = False
    model.eval().requires_grad_(False)
    return offload_layers(model, device) if section.offload else model


def load_student(
    section: Student,
    *,
    teacher: PreTrainedModel | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    selection: Selection | None = None,
    once: Once = each_time,
) -> Any:
    """The student on `device`, in train mode: loaded, cut from the teacher, or random; with LoRA if asked for.

    Args:
        teacher: Needed for `from_teacher`, before its layers are patched or sharded.
        dtype: Overrules `section.dtype`; where that is `auto`, the checkpoint's (the teacher's for `from_teacher`).
        selection: Parts of the teacher (`select_parts`), needed where they are chosen by rows of the training data.
        once: As of `load_teacher`, for a student whose checkpoint stays frozen.

    Returns:
        A `PreTrainedModel`, or a `peft.PeftModel` around it; what is to be trained has `requires_grad`.
    """
    device = torch.device(device)
    dtype = dtype or _named_dtype(section.dtype)
    if not section.is_cut:
        student = once(lambda: _load(section, "student", device, dtype, STUDENT_SEED))
    else:
        if teacher is None:
            raise ValueError("student.from_teacher: expected a loaded teacher to cut from, got none")
        if is_patched(teacher):
            raise ValueError("student.from_teacher: expected an unpatched teacher, got a patched one; cut first")
        if quantised_by_transformers(teacher):
            raise ValueError(
                "student.from_teacher: layers cannot be cut out of a quantised teacher; give the teacher in bfloat16, "
                "or name a student that is cut already by student.model"
            )
        student = _place(_cut(teacher, section.from_teacher, dtype, selection), device)
        correct_forward(student)
        if section.dtype == "nf4":
            student = quantise_nf4(student, device, "student")
    student.config.use_cache = False
    student.train()
    for parameter in student.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    if section.lora is not None:
        student = add_lora(student, section.lora)
    freeze_parts(student, section.freeze)
    return student


def _cut(
    teacher: PreTrainedModel, cut: FromTeacher | None, dtype: torch.dtype | None, selection: Selection | None
) -> PreTrainedModel:
    if cut is None or not cut.is_calibrated:
        return cut_layers(teacher, layer_indices(cut, layer_count(teacher.config)), dtype)
    if selection is None:
        raise ValueError(
            "student.from_teacher: its parts are chosen by rows of the training data, which are not read here; save "
            "the student of a run and name its folder by student.model"
        )
    shape = shape_for(cut, teacher.config)
    if shape.widths is None or shape.layout is None:
        return cut_layers(teacher, selection.layers, dtype)
    return cut_parts(teacher, selection, shape.widths, shape.layout, dtype)


def load_config(section: ModelSection, field: str) -> Any:
    """The configuration that `section` tells: of `config` for random weights, else of `model`.

    Raises:
        ValueError: there is none, or it is not one that transformers knows.
    """
    trusted = section.trust_remote_code
    if section.init == "random":
        assert section.config is not None
        path = find_architecture(section.config, f"{field}.config")
        return copy.deepcopy(_config_of(path, path.stat().st_mtime_ns, f"{field}.config", trusted))
    assert section.model is not None
    spec = section.model
    field = f"{field}.model"
    source = resolve_model_source(spec, field)
    arguments = remote_arguments(section, field.partition(".")[0])
    if source.gguf_file:
        modified = Path(source.location, source.gguf_file).stat().st_mtime_ns
        return copy.deepcopy(_gguf_config(source, modified, spec, field))
    with loading(spec, source, field):
        values, _ = PreTrainedConfig.get_config_dict(source.location, revision=arguments.get("revision"))
    check_config(values, field, spec, trusted=trusted)
    with loading(spec, source, field):
        return AutoConfig.from_pretrained(source.location, **arguments)


@functools.lru_cache(maxsize=32)
def _config_of(path: Path, modified: int, field: str, trusted: bool) -> Any:
    """Return the content of a config.json; `modified`, its time, makes a changed file be read again."""
    values = read_json(path, field)
    check_config(values, field, str(path), trusted=trusted)
    with loading(str(path), ModelFiles(str(path)), field):
        if not isinstance(kind := values.pop("model_type", None), str):
            raise ValueError("it is not a model configuration: it has no model_type")
        return AutoConfig.for_model(kind, **values)


@functools.lru_cache(maxsize=32)
def _gguf_config(source: ModelFiles, modified: int, spec: str, field: str) -> Any:
    """Return the configuration from a GGUF file's header, which takes seconds to read; `modified` as above."""
    with loading(spec, source, field):
        return AutoConfig.from_pretrained(source.location, gguf_file=source.gguf_file)


def _named_dtype(name: str) -> torch.dtype | None:
    # what is not quantised of an 8-bit teacher; in fp8 it is quantised later (fp8_teacher.py)
    if name in EIGHT_BITS:
        return torch.bfloat16
    return None if name in ("auto", "nf4") else getattr(torch, name)


def _attention(section: ModelSection) -> dict[str, Any]:
    return {} if section.attention == "auto" else {"attn_implementation": section.attention}


def _place(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    return model.to(device)  # type: ignore[arg-type]


def _load(
    section: ModelSection,
    field: str,
    device: torch.device,
    dtype: torch.dtype | None,
    seed: int,
    adapter: str | None = None,
) -> PreTrainedModel:
    """The model of a section in its `dtype` on `device`, with `adapter` merged into it."""
    if section.dtype != "nf4":
        model = _dense(section, field, device, dtype, seed)
        return model if adapter is None else load_and_merge(model, adapter)
    require_bitsandbytes(field)
    if section.init == "random" and adapter is None:
        return _random_in_4_bits(section, field, device, dtype, seed)
    # read into host memory: the device gets the layers one after another, each in 4 bits
    model = _dense(section, field, torch.device("cpu"), dtype, seed)
    model = model if adapter is None else load_and_merge(model, adapter)
    return quantise_nf4(model, device, field)


def _dense(
    section: ModelSection, field: str, device: torch.device, dtype: torch.dtype | None, seed: int
) -> PreTrainedModel:
    if section.init == "random":
        return _random(section, field, device, dtype, seed)
    assert section.model is not None
    source = resolve_model_source(section.model, f"{field}.model")
    arguments = remote_arguments(section, field) | _attention(section)
    if source.gguf_file:
        dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        # without dequantize=True the model counts as quantised: it can neither be trained nor saved
        arguments |= {"gguf_file": source.gguf_file, "quantization_config": GgufConfig(dequantize=True)}
    elif device.type == "cuda":
        arguments["device_map"] = {"": device}  # straight onto the GPU, never whole in host memory
    if section.dtype == "int8":
        arguments |= int8_arguments(source.gguf_file, device, field)
    config = None if source.gguf_file else load_config(section, field)
    if config is not None:
        check_quantisation(config, section, field)
    with loading(section.model, source, f"{field}.model"), naming_the_quantisation(config):
        if not source.local and (
            index := cached_file(
                source.location,
                SAFE_WEIGHTS_INDEX_NAME,
                revision=section.revision,
                _raise_exceptions_for_missing_entries=False,
            )
        ):
            check_index(Path(index), f"{field}.model")
        model = read_weights(
            AutoModelForCausalLM,
            source.location,
            f"{field}.model",
            file_config=config,
            dtype=dtype or "auto",
            use_safetensors=None if source.gguf_file else True,
            **arguments,
        )
    check_quantised(model, section, field)
    correct_forward(model, section.attention, f"{field}.attention")
    return _place(model, device)


def _random(
    section: ModelSection, field: str, device: torch.device, dtype: torch.dtype | None, seed: int
) -> PreTrainedModel:
    """Random weights, the same for the same seed and device; made on the device, where that is fast."""
    config = load_config(section, field)
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), device:
        torch.manual_seed(seed)
        with loading(str(section.config), ModelFiles(""), f"{field}.config"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **_attention(section))
    correct_forward(model, section.attention, f"{field}.attention")
    return _place(model, device)


def _random_in_4_bits(
    section: ModelSection, field: str, device: torch.device, dtype: torch.dtype | None, seed: int
) -> PreTrainedModel:
    """Random weights in 4 bits, drawn on the device a layer at a time."""
    config = load_config(section, field)
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    model = without_memory(config, model_options(section, dtype))
    correct_forward(model, section.attention, f"{field}.attention")
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        return quantise_nf4(model, device, field, lambda part: draw_weights(model, part, device))


@torch.no_grad()
def draw_weights(model: Any, part: nn.Module, device: torch.device) -> None:
    """Give the parameters of a part of `model` that have no memory yet some on `device`, with random weights."""
    for module in part.modules():
        empty = {name: weight for name, weight in module._parameters.items() if weight is not None and weight.is_meta}
        for name, weight in empty.items():
            module._parameters[name] = nn.Parameter(torch.empty_like(weight, device=device), requires_grad=False)
        if empty:
            model._init_weights(module)


def model_options(section: ModelSection, dtype: torch.dtype) -> dict[str, Any]:
    return {"dtype": dtype, "trust_remote_code": section.trust_remote_code, **_attention(section)}


def without_memory(config: Any, options: Mapping[str, Any]) -> Any:
    """A frozen teacher with parameters on the meta device and buffers, which no checkpoint may hold, in memory."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, **options)
    model.tie_weights()
    model.config.use_cache = False
    return model.eval().requires_grad_(False)


def save_student(model: Any, tokenizer: PreTrainedTokenizerBase | None, folder: Path, lora: Lora | None = None) -> Path:
    """Save a student so that `AutoModelForCausalLM.from_pretrained(folder)` and `generate` take it as it is.

    Weights keep their dtype, tied ones stay tied. Of a LoRA student the merged model goes to `folder`, and the
    adapter alone to `adapter/` beside it. A folder appears only when it is complete; one that exists is replaced.

    Args:
        model: The student, unwrapped from DDP or FSDP; not changed.
        lora: LoRA section; with `save: adapter` only the adapter is written, for PEFT to add to its base model.
    """
    folder = Path(folder)
    is_lora = hasattr(model, "peft_config")
    if is_lora and lora is not None and lora.save == "adapter":
        with atomic_folder(folder, over=True) as unfinished:
            save_adapter(model, unfinished)
            if tokenizer is not None:
                tokenizer.save_pretrained(unfinished)
        return folder
    plain = merged(model) if is_lora else model
    with atomic_folder(folder, over=True) as unfinished:
        used = plain.config.use_cache
        plain.config.use_cache = True
        try:
            plain.save_pretrained(unfinished)
        finally:
            plain.config.use_cache = used
        quantised = quantised_weights(model)
        if quantised is not None:
            quantised.saved().write(unfinished)
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
    if is_lora and quantised_weights(model) is None:  # its adapters belong to base weights that are not the model's
        with atomic_folder(folder.parent / "adapter", over=True) as unfinished:
            save_adapter(model, unfinished)
    return folder
