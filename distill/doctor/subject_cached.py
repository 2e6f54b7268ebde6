"""A teacher on disk, examined: what is stored of whole documents, which are found by their tokens."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from distill_kernels import FusedTopKKLLoss, LossTerm
from safetensors.torch import load_file

from distill.data.collator import Collator
from distill.doctor.reference_loss import reference_loss, shifted, token_loss, top_k_loss
from distill.doctor.subject import Row, Subject, Verdict, worst_of
from distill.teachers.cache.encode import LEAST_TAIL
from distill.teachers.cache.format import HEAD
from distill.teachers.cache.objective import HiddenObjective, TopKObjective
from distill.teachers.cache.objective import top_k_loss as fused_top_k
from distill.teachers.cache.read import CachedRows, TeacherCache
from distill.teachers.objective import IGNORE, build_loss

FITS = 64  # tokens of the documents that are looked for
STORED = 0.05  # what half precision may move a stored log-probability, natural logarithm


@dataclass
class CachedTeacher(Subject):
    """A `Subject` whose `teacher` is None.

    Attributes:
        cache: what it said.
    """

    cache: TeacherCache | None = None

    chosen: ClassVar[int] = FITS

    @property
    def teachers(self) -> list[Any]:
        """None is loaded."""
        return []

    @property
    def stored(self) -> TeacherCache:
        """The cache."""
        assert self.cache is not None
        return self.cache

    @property
    def divergences(self) -> tuple[LossTerm, ...]:  # type: ignore[override]
        """Those that the cache serves."""
        if self.stored.is_hidden:
            return Subject.divergences
        kinds = ["forward_kl"] if self.stored.manifest["tail"] == "sampled" else ["forward_kl", "reverse_kl"]
        return tuple(LossTerm(kind, 1.0) for kind in kinds)

    @property
    def objective_type(self) -> Any:
        """From the cache."""
        return functools.partial(HiddenObjective if self.stored.is_hidden else TopKObjective, cache=self.stored)

    def shrunk(self) -> Subject:
        """A small student; what the teacher said stays."""
        student = self.small()[0] if self.small else copy.deepcopy(self.student)
        return replace(self, student=student, small=None)

    def collator(self, pad_token_id: int = 0, **settings: Any) -> Callable[[Any], dict[str, Any]]:
        """Batches with what was stored."""
        return CachedRows(Collator(pad_token_id, **settings), self.stored)

    @staticmethod
    def shortened(document: Row, tokens: int) -> dict[str, list[int]] | None:
        """A document is found by its tokens: it stays whole."""
        learned = any(label != IGNORE for label in document["labels"])
        return {name: list(values) for name, values in document.items()} if learned else None

    @staticmethod
    def with_masked_end(row: Row, token: int) -> dict[str, list[int]] | None:
        """Another document, of which nothing is stored."""
        return None

    # -------------------------------------------------------------- measures

    def reference(self) -> torch.Tensor:
        """From the student's full logits and what the cache's shards hold, in the order of the rows."""
        batch = Collator(0)(self.rows)
        batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
        logits = self.student(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
        ).logits  # fmt: skip
        soft = any(term.type != "cross_entropy" and term.weight for term in self.loss.terms)
        if not soft:
            return reference_loss(logits, logits.detach(), batch["labels"], self.loss)
        labels = shifted(batch["labels"])
        keep = labels != IGNORE
        said = {name: value.to(self.device) for name, value in self.stored.said(list(self.rows)).items()}
        objective = self.objective()
        objective.detach()
        z_s, columns = logits[keep][:, : objective.columns], objective.columns
        if self.stored.is_hidden:
            shape, head = objective.reading.teacher, load_file(self.stored.path / HEAD, device=str(self.device))
            weight, bias = (head[name].double() if name in head else None for name in ("weight", "bias"))
            assert weight is not None
            z_t = shape.scale * torch.nn.functional.linear(said["cached_hidden"].double(), weight, bias)
            z_t = shape.softcap * torch.tanh(z_t / shape.softcap) if shape.softcap else z_t
            return token_loss(z_s, [(1.0, z_t[:, :columns])], labels[keep], self.loss)
        tail = self.stored.manifest["tail"]
        ids, probabilities = said["cached_ids"].long(), said["cached_logprobs"].double().exp()
        if tail != "sampled":  # rounding moved their sum; the tail is stored on its own and is what counts
            kept = 1 - said["cached_tail"].double().clamp_min(LEAST_TAIL).exp()
            probabilities = probabilities * (kept / probabilities.sum(-1))[:, None]
        return top_k_loss(z_s, ids, probabilities, tail, labels[keep], self.loss)

    def single(self, objective: Any, term: LossTerm) -> Any:
        """The term over what is stored."""
        if self.stored.is_hidden:
            return build_loss([term], objective.reading)
        manifest = self.stored.manifest
        at = float(manifest["temperature"])
        return fused_top_k(build_loss({"temperature": at, "terms": [_spelled(term)]}, objective.reading),
                           manifest["tail"], at)  # fmt: skip

    def teacher_states(self, objective: Any, batch: Mapping[str, Any]) -> tuple[torch.Tensor, Any]:
        """The stored hidden states and the stored head."""
        objective.loss = self.single(objective, self.divergences[0])
        return objective.signal(batch).to(objective.head.weight.dtype), objective.head

    def from_itself(self) -> tuple[str, float]:
        """Stored hidden states as any teacher's; K stored tokens against a student that says just these.

        That student's logits are the stored log-probabilities, one more column is all other tokens.
        """
        if self.stored.is_hidden:
            what, worst = super().from_itself()
            return f"{what}'s stored states", worst
        tail, objective = self.stored.manifest["tail"], self.objective()
        objective.loss = self.single(objective, self.divergences[0])
        signal = objective.signal(self.batch())
        objective.detach()
        learned = self.batch()["valid_rows"]
        said = signal.logprobs.flatten(0, -2)[learned].float()
        rest = (1 - said.double().exp().sum(-1, keepdim=True)).clamp_min(1e-30).log().to(said)
        z = torch.cat([said, rest], -1).clamp_min(-80.0)
        ids = torch.arange(said.shape[-1], device=said.device, dtype=torch.int32).expand(said.shape)
        one, kinds = (
            torch.eye(z.shape[-1], device=z.device),
            [term.type.removesuffix("_kl") for term in self.divergences],
        )
        found = [FusedTopKKLLoss(kind, tail)(z, one, ids, said) for kind in kinds]
        return f"the stored {said.shape[-1]} tokens ({tail})", worst_of(found)

    # -------------------------------------------------------- the same tokens

    def same_tokens(self, columns: int, batch: Mapping[str, Any]) -> Verdict:
        """Whether what is stored of a place is of the token that stands there, and all documents are in the cache."""
        fine, told = super().same_tokens(columns, batch)
        if not fine:
            return fine, told
        if self.stored.is_hidden:
            return True, f"{told}; {len(batch['valid_rows'])} hidden states found by their documents' tokens"
        wanted = shifted(batch["labels"]).flatten()[batch["valid_rows"]]
        if int(batch["cached_ids"].max()) >= self.stored.columns:
            return False, f"a stored id is not below {self.stored.columns:,}"
        if self.stored.manifest["tail"] == "sampled" or self.stored.manifest["temperature"] != 1.0:
            return True, f"{told}; {len(wanted)} places found by their documents' tokens"
        found = batch["cached_ids"] == wanted[:, None]
        here = found.any(-1)
        off = torch.where(found, batch["cached_logprobs"].float() - batch["cached_label_logprob"].float()[:, None], 0.0)
        worst = off.abs().max().item() if len(off) else 0.0
        if worst > STORED:
            return False, f"the stored log-probabilities of the tokens that stand here are off by {worst:.1e}"
        return True, f"{told}; {len(wanted)} places found in the cache, {int(here.sum())} of them with the token there"

    def _head_rows(self) -> list[int]:
        return [self.stored.columns, *super()._head_rows()]

    # -------------------------------------------------------------- elsewhere

    def told(self) -> dict[str, Any]:
        """Where the cache lies."""
        return {"cache": str(self.stored.path.absolute())}

    @classmethod
    def retold(cls, told: Mapping[str, Any], teachers: list[Any]) -> tuple[Any, dict[str, Any]]:
        """The cache opened again."""
        return None, {"cache": TeacherCache(told["cache"])}


def nearest(documents: Sequence[Row], count: int, tokens: int = FITS) -> list[Row]:
    """The documents whose lengths are the nearest to `tokens`: those that are looked at stay whole."""
    return sorted(documents, key=lambda document: abs(len(document["input_ids"]) - tokens))[:count]


def _spelled(term: LossTerm) -> dict[str, Any]:
    return {name: value for name, value in term._asdict().items() if value is not None}
