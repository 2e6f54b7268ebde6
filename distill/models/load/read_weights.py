"""Reading of a model's files, which must be exactly its weights.

    model = read_weights(AutoModelForCausalLM, folder, "teacher.model", dtype="auto")

transformers initialises a tensor that the files lack at random, ignores one that the model does not have, and reports
both in a table that is easily missed. Here both are errors that name the tensors, and so are different shapes. Tensors
that transformers itself does not require (tied weights, buffers, those a model's class declares) may be absent; tensors
that may be in the files and stay unread are listed in `UNREAD`, and a log line names them.

`weights_fault` finds the same from the headers of the files, in milliseconds, without reading a weight.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils import logging as transformers_logging

from distill.core import console
from distill.models.load.config_validation import check_index, gguf_tensors

log = logging.getLogger(__name__)

NAMED = 3  # tensors that a message names
QUANTISATION = r"scale|zero|amax|absmax|quant_|g_idx|hadamard"  # in names of what no plain layer has
CLEAN = (
    "where they are not needed, AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER) writes a "
    "folder without them"
)


class UnfitWeightsError(ValueError):
    """Files that are not the weights of a model; `names` are those of the model that are absent or misshapen."""

    def __init__(self, message: str, names: Iterable[str] = ()) -> None:
        self.names = sorted(names)
        super().__init__(message)


def _is_made_anew(name: str, model: PreTrainedModel) -> bool:
    """Tell buffers of the model, and the causal masks that early checkpoints of GPT-2 and its kin hold."""
    if any(name == own or name.endswith("." + own) for own, _ in model.named_buffers()):
        return True
    return bool(re.search(r"(^|\.)(attn|attention)\.(masked_)?bias$", name))  # no learned bias is called so


def _predicts_later_tokens(name: str, model: PreTrainedModel, config: Any) -> bool:
    """Tell heads that predict several tokens at once (MTP): a module of that name, or layers after the last."""
    if re.match(r"(model\.)?mtp(_\w+)?\.", name):
        return True
    text = model.config.get_text_config()
    further = getattr(text, "num_nextn_predict_layers", None)
    place = re.match(r"(?:\w+\.)*?layers\.(\d+)\.", name)
    total = text.num_hidden_layers
    return place is not None and isinstance(further, int) and total <= int(place[1]) < total + further


def _is_of_another_modality(name: str, model: PreTrainedModel, config: Any) -> bool:
    """Tell what stands beside the decoder in a multimodal model's files where its text part alone is loaded."""
    if not getattr(config, "sub_configs", None) or type(config) is type(model.config):
        return False
    modules = {module for module, _ in model.named_modules()}
    parent = name.rpartition(".")[0]
    while parent not in modules:  # "" is the model
        parent = parent.rpartition(".")[0]
    return parent in ("", model.base_model_prefix)


def _is_of_quantisation(name: str, model: PreTrainedModel, config: Any) -> bool:
    """Tell the scales and the like that a quantised checkpoint holds beside what its method reads."""
    last = name.rpartition(".")[2]
    return getattr(model, "hf_quantizer", None) is not None and bool(re.search(QUANTISATION, last))


UNREAD: Mapping[str, Callable[[str, PreTrainedModel, Any], bool]] = {
    "heads for several tokens at once": _predicts_later_tokens,
    "other modalities; the model is loaded for text alone": _is_of_another_modality,
    "scales and the like that this quantisation method does not take": _is_of_quantisation,
}


def read_weights(
    kind: Any, location: str | Path | None, field: str, *, file_config: Any = None, **arguments: Any
) -> PreTrainedModel:
    """Load a model, and check that its files have all of its weights and nothing else.

    Args:
        kind: A model class of transformers, or `AutoModelForCausalLM`.
        location: Location arguments of `from_pretrained`.
        field: Field of the recipe, at the begin of log lines.
        file_config: The configuration in the files; where it is a multimodal one and the model is its text part, the
            other parts may stay unread.
        arguments: More of `from_pretrained`.

    Raises:
        UnfitWeightsError: tensors that the files lack, that the model does not have, or of another shape: the first
            few by name, and how many there are.
    """
    with _kept_report() as report, _counted():
        try:
            model, found = kind.from_pretrained(
                location, output_loading_info=True, ignore_mismatched_sizes=True, **arguments
            )
        except RuntimeError as error:
            wrong = report.conversions()
            if not wrong:
                raise
            raise UnfitWeightsError(
                f"{_named(wrong)}: the tensors in its files do not make it up (one is absent, or of another shape)",
                wrong,
            ) from error
    refuse_incomplete(found["missing_keys"], found["mismatched_keys"])
    _hold_unread(model, found["unexpected_keys"], field, file_config)
    file = arguments.get("gguf_file")
    if file is not None:
        _hold_gguf(model, Path(str(location), file), field, knows_rope="config" in arguments)
    return model


def refuse_incomplete(missing: Iterable[str], mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """Refuse a model of which transformers drew tensors at random, since its files do not give them.

    Args:
        missing: Names of the tensors that the files lack.
        mismatched: Name, shape in the files and shape in the model of those that do not fit.

    Raises:
        UnfitWeightsError: There is one; names the first few, and how many there are.
    """
    absent = list(missing)
    if absent:
        raise UnfitWeightsError(
            f"its files lack {_named(absent)}, which would be drawn at random; fetch or make them again", absent
        )
    wrong = sorted(mismatched)
    if wrong:
        _, there, here = wrong[0]
        names = [name for name, _, _ in wrong]
        raise UnfitWeightsError(
            f"{_named(names)}: expected the shape {list(here)} of config.json, got {list(there)} in its files", names
        )


def _hold_unread(model: PreTrainedModel, names: Iterable[str], field: str, config: Any) -> None:
    kinds: dict[str | None, list[str]] = {}
    for name in names:
        if not _is_made_anew(name, model):
            what = next((what for what, covers in UNREAD.items() if covers(name, model, config)), None)
            kinds.setdefault(what, []).append(name)
    foreign = kinds.pop(None, None)
    if foreign:
        raise UnfitWeightsError(
            f"its files hold {_named(foreign)}, which a {type(model).__name__} does not have; {CLEAN}"
        )
    for what, unread in kinds.items():
        log.warning("%s: not read: %s (%s)", field, _named(unread), what)


def _hold_gguf(model: PreTrainedModel, path: Path, field: str, *, knows_rope: bool) -> None:
    """Hold a GGUF file's tensors against the model, since transformers passes over those that it does not know."""
    from transformers import modeling_gguf_pytorch_utils as gguf

    architecture, names = gguf_tensors(path, field)
    processor = gguf.TENSOR_PROCESSORS.get(architecture, gguf.TensorProcessor)(config={})
    ours = {name.removesuffix(".weight"): own for name, own in gguf.get_gguf_hf_weights_map(model, processor).items()}
    there = {name.removesuffix(".weight") for name in names}
    parts: dict[str, set[str]] = {}  # a weight of ours that several tensors make up, as experts' do
    for name, own in ours.items():
        parts.setdefault(own, set()).add(name)
    halves = {name for group in parts.values() if group & there for name in group - there}
    if halves:
        raise ValueError(f"the file lacks {_named(halves)}; fetch or make it again")
    ropes = {name for name in there if name.startswith("rope_")}
    foreign = there - ours.keys() - ropes - {"output"}
    if foreign:
        raise ValueError(f"the file holds {_named(foreign)}, which transformers does not read for {architecture}")
    if ropes and not knows_rope:
        log.warning(
            "%s: transformers does not read %s of a GGUF file: positions are rotated without this scaling, so that the "
            "outputs are not those of the original model; give its safetensors instead",
            field,
            _named(ropes),
        )


def weights_fault(folder: Path, model: PreTrainedModel, field: str, *, file_config: Any = None) -> str | None:
    """Return why the safetensors in `folder` do not match `model`, from their headers alone; None where they do.

    Args:
        folder: A model's folder; the files count that transformers reads, and nothing that lies beside them.
        model: Model of the architecture, such as one on the device `meta`; not changed.
        field, file_config: See `read_weights`.
    """
    empty: dict[str, torch.Tensor] = {}
    for path in _files_read(folder, field):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no dictionary
                empty[name] = torch.empty(file.get_slice(name).get_shape(), device="meta")
    try:
        read_weights(
            type(model),
            None,
            field,
            file_config=file_config,
            config=model.config,
            state_dict=empty,
            device_map={"": "meta"},
        )
    except ValueError as error:
        return str(error)
    return None


def _files_read(folder: Path, field: str) -> list[Path]:
    """Return the files that transformers reads weights from: one, else those of an index, else all that there are."""
    if (single := folder / SAFE_WEIGHTS_NAME).is_file():
        return [single]
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    return [folder / name for name in check_index(index, field)] if index.is_file() else [*folder.glob("*.safetensors")]


def _named(names: Collection[str]) -> str:
    ordered = sorted(names, key=lambda name: [part.zfill(9) if part.isdigit() else part for part in name.split(".")])
    more = f" and {len(ordered) - NAMED} other tensors" if len(ordered) > NAMED else ""
    return ", ".join(ordered[:NAMED]) + more


class _Report(logging.Filter):
    """Filter that keeps transformers' table of loaded weights out of the log, and stores it."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self.level = level
        self.text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let everything else through that would have been logged."""
        if "LOAD REPORT" not in str(record.msg):
            return record.levelno >= self.level
        self.text = re.sub(r"\x1b\[[0-9;]*m", "", record.getMessage())
        return False

    def conversions(self) -> list[str]:
        """Names of weights that could not be made of the tensors in the files."""
        return re.findall(r"^(\S+)\s*\|\s*CONVERSION", self.text, re.MULTILINE)


@contextlib.contextmanager
def _counted() -> Iterator[None]:
    """Count tensors in the activity that is shown, in place of transformers' own bar."""

    def bar(_: object, args: Sequence[Collection[object]], settings: object) -> Iterator[object]:
        for item in args[0]:
            yield item
            console.advance(total=len(args[0]))

    hook = getattr(transformers_logging, "set_tqdm_hook", lambda _: None)  # releases without it count nothing
    before = hook(bar)
    try:
        yield
    finally:
        hook(before)


@contextlib.contextmanager
def _kept_report() -> Iterator[_Report]:
    logger = logging.getLogger("transformers.modeling_utils")
    level = logger.level
    report = _Report(logger.getEffectiveLevel())
    logger.addFilter(report)
    # below WARNING: at it, transformers goes through the plan for tensor parallelism as well, and warns of that
    logger.setLevel(min(logger.getEffectiveLevel(), logging.WARNING - 1))
    try:
        yield report
    finally:
        logger.setLevel(level)
        logger.removeFilter(report)
