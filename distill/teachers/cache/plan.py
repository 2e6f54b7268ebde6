"""What a cache is made of, whoever writes it: `distill cache`, or a run whose teacher's answers are kept."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from distill.core.environment import environment
from distill.core.files import replacing_folder
from distill.core.manifest import sums_of
from distill.models.document_rope import follows_length
from distill.models.head import HeadWeights, LogitTransform, last_hidden
from distill.models.load import save_student
from distill.recipe import Recipe
from distill.recipe.models import EIGHT_BITS
from distill.teachers.base import Teacher
from distill.teachers.cache.encode import Encoding, encode, pack_hidden
from distill.teachers.cache.format import (
    DTYPES,
    FIGURES,
    HEAD,
    KEY_BYTES,
    MANIFEST,
    PLAN,
    SHARD,
    STUDENT,
    TEACHER,
    TOKENIZER,
    VERSION,
    Plan,
    as_arrays,
    document_sums,
    map_tensors,
    shard_path,
    split_ids,
    sum_of_sums,
    write_signed,
    write_tensors,
)
from distill.teachers.cache.identity import text_hashes
from distill.teachers.cache.read import data_settings
from distill.teachers.cache.settings import Settings
from distill.teachers.identity import teacher_identity
from distill.teachers.model import LoadedTeacher


class EncodableTeacher(NamedTuple):
    """The teacher in parts.

    Attributes:
        hidden_states: of a collated batch, [B, S, H].
        head: what makes logits of them; likewise `transform`.
        transform: scale and soft cap.
        device: where it is.
        sharded: whether the processes hold it together, so that all must call it as often.
        needs_positions: whether padding on the right changes what it computes where it is given no positions.
    """

    hidden_states: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
    head: HeadWeights
    transform: LogitTransform
    device: torch.device
    sharded: bool = False
    needs_positions: bool = False


def encodable(loaded: Teacher, device: torch.device) -> EncodableTeacher:
    """A loaded teacher in the parts that caching needs.

    The head of a sharded one is kept whole beside its shards.
    """
    assert isinstance(loaded, LoadedTeacher)
    with loaded.hidden.head.open() as weights:
        if loaded.is_collective:
            bias = weights.bias
            weights = HeadWeights(weights.weight.clone(), None if bias is None else bias.clone(), None)
    return EncodableTeacher(
        functools.partial(last_hidden, loaded.model), weights, loaded.hidden.transform, device, loaded.is_collective,
        follows_length(loaded.model),
    )  # fmt: skip


class Origin(NamedTuple):
    """What a cache is made of beside the teacher.

    Attributes:
        recipe: whose data are cached.
        digest: hash of their source.
        tokenizer: that makes them; None for random tokens.
        ids_below: of random tokens; None for text.
        layer_indices: of the teacher, that a student cut from it has; None for any other.
    """

    recipe: Recipe
    digest: str
    tokenizer: PreTrainedTokenizerBase | None
    ids_below: int | None
    layer_indices: list[int] | None


def plan_of(origin: Origin, settings: Settings, teacher: EncodableTeacher, columns: int) -> dict[str, Any]:
    """What a cache will be, all but the documents; `columns` of the vocabulary are those that K tokens are taken of."""
    recipe, head, section = origin.recipe, teacher.head, origin.recipe.teacher
    kind = {"kind": "hidden"} if settings.hidden else {"kind": "top_k", "k": settings.k, "tail": settings.tail}
    return {
        "version": VERSION,
        **kind,
        "temperature": None if settings.hidden else recipe.loss.temperature,
        "dtype": settings.dtype,
        "vocabulary": len(head.weight) if settings.hidden else columns,
        "hidden": head.weight.shape[1],
        "scale": teacher.transform.scale,
        "softcap": teacher.transform.softcap,
        "seed": recipe.train.seed,
        "ids_below": origin.ids_below,
        "teacher": teacher_identity(section)
        | {"dtype": section.held if section.dtype in EIGHT_BITS else str(head.weight.dtype).removeprefix("torch.")},
        "text": text_hashes(recipe, origin.tokenizer),
        "data": data_settings(recipe, origin.digest),
        "student_layers": origin.layer_indices,
        "versions": environment(),
    }


@torch.no_grad()  # FSDP2's gathered weights must not be made under inference mode
def stored_tensors(
    plan: Plan, hidden: torch.Tensor, labels: torch.Tensor, teacher: EncodableTeacher,
    generator: torch.Generator,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """What is stored of hidden states [M, H] and labels [M]: hidden states where they are, K tokens on the CPU."""
    dtype = DTYPES[plan["dtype"]]
    if plan["kind"] == "hidden":
        return pack_hidden(hidden, dtype)
    encoding = Encoding(*(plan[name] for name in ("vocabulary", "k", "tail", "temperature")))
    top = encode(hidden, teacher.head, teacher.transform, labels, encoding, generator).to(dtype)
    low, high = split_ids(top.ids.cpu().numpy(), plan["vocabulary"])
    tensors = {"ids": torch.from_numpy(low), "logprobs": top.logprobs.cpu()}
    tensors |= {name: getattr(top, name).cpu() for name in FIGURES}
    return tensors if high is None else tensors | {"ids_high": torch.from_numpy(high)}


def shard_of(keys: Sequence[bytes], counts: Sequence[int], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A shard: what is stored of documents, by position, with their keys, where their positions begin, and checksums.

    Args:
        keys: of the documents.
        counts: positions of each.
        tensors: what is stored of them, in that order.
    """
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    assert all(len(tensor) == offsets[-1] for tensor in tensors.values()), "a position was lost"
    named = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)
    tensors |= {"keys": torch.from_numpy(named.copy()), "offsets": torch.from_numpy(offsets)}
    return tensors | {"sums": torch.tensor(document_sums(as_arrays(tensors), range(len(keys))))}


def write_companions(folder: Path, model: Any, tokenizer: Any, head: HeadWeights | None, cut: Any) -> None:
    """Write what goes with the shards: the model's configuration, the tokenizer, and where they are not there yet the
    head (None where K tokens are stored) and the student that is cut from the teacher (None for any other)."""
    model.config.save_pretrained(folder / TEACHER)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder / TOKENIZER)
    if head is not None and not (folder / HEAD).is_file():
        tensors = {"weight": head.weight.detach()} | ({} if head.bias is None else {"bias": head.bias.detach()})
        write_tensors(folder / HEAD, {name: tensor.cpu().clone() for name, tensor in tensors.items()})
    if cut is not None and not (folder / STUDENT).is_dir():
        with replacing_folder(folder / STUDENT) as beside:
            save_student(cut, None, beside)


def close_cache(folder: Path, plan: Plan) -> Plan:
    """Write the manifest, which makes the cache complete; its shards are numbered without a gap."""
    count = next(number for number in range(1 << 30) if not shard_path(folder, number).is_file())
    ends = [map_tensors(shard_path(folder, number))["offsets"] for number in range(count)]
    manifest = {
        **plan, "documents": sum(len(offsets) - 1 for offsets in ends),
        "positions": sum(int(offsets[-1]) for offsets in ends),
        "shards": [shard_path(folder, number).stat().st_size for number in range(count)],
        "sums": [sum_of_sums(shard_path(folder, number)) for number in range(count)],
        "files": {name: entry for name, entry in sums_of(folder, skip=SHARD).items() if name != PLAN},
    }  # fmt: skip
    write_signed(folder / MANIFEST, manifest)
    return manifest
