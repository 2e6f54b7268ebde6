"""The loss against K stored tokens of each position, from what a cache's files hold of the rows."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from distill_kernels import FusedTopKKLLoss, LossTerm
from torch import nn

from distill.core.labels import IGNORE_INDEX
from distill.doctor.elsewhere import ELSEWHERE
from distill.doctor.reference import INPUTS, Reference, Verdict, worst_of
from distill.doctor.reference_loss import shifted, top_k_loss
from distill.doctor.rows import Row
from distill.recipe.loss import Loss
from distill.teachers.base import Batch, Teacher
from distill.teachers.cache.encode import LEAST_TAIL
from distill.teachers.cache.top_k import TopKFormat

STORED = 0.05  # what half precision may move a stored log-probability, natural logarithm


class TopKReference(Reference):
    """Of K tokens that a cache stores."""

    @property
    def manifest(self) -> Mapping[str, Any]:
        """Of the cache, as the format has it."""
        return self.teacher.format.manifest

    @property
    def temperature(self) -> float:
        """The one that the tokens were stored at."""
        return float(self.manifest["temperature"])

    def warm(self) -> Teacher:
        """The stored probabilities taken for ones at temperature 2."""
        teacher = copy.copy(self.teacher)
        teacher.format = TopKFormat({**self.manifest, "temperature": 2.0})
        return teacher

    def stored(self, rows: Sequence[Row], batch: Batch) -> Mapping[str, torch.Tensor]:
        """`ids`, `logprobs` and `tail` of the learned positions: of rows, or, without any, of what the batch holds."""
        return self.stored_by(self.teacher, rows, batch)

    @staticmethod
    def stored_by(teacher: Any, rows: Sequence[Row], batch: Batch) -> Mapping[str, torch.Tensor]:
        """The same of a teacher's own rows and batch."""
        return ELSEWHERE[type(teacher)].tokens(teacher, rows, batch)

    def loss(
        self, student: nn.Module, rows: Sequence[Row], batch: Batch, loss: Loss, columns: int | None
    ) -> torch.Tensor:
        """From the student's full logits, cut to the columns that the tokens were taken from."""
        labels = shifted(batch["labels"])
        keep = labels != IGNORE_INDEX
        z_s = student(**{name: batch[name] for name in INPUTS}, use_cache=False).logits[keep]
        stored = self.stored(rows, batch)
        tail = self.manifest["tail"]
        ids, probabilities = stored["ids"].long(), stored["logprobs"].double().exp()
        if tail != "sampled":  # rounding moved their sum; the tail is stored on its own and is what counts
            share = 1 - stored["tail"].double().clamp_min(LEAST_TAIL).exp()
            probabilities = probabilities * (share / probabilities.sum(-1))[:, None]
        z_s = z_s[:, : columns or self.manifest["vocabulary"]]
        return top_k_loss(z_s, (ids, probabilities), tail, labels[keep], loss, self.dtype)

    def from_itself(self, batch: Batch, terms: Sequence[LossTerm]) -> tuple[str, float]:
        """Against a student that says just these tokens: its logits are the stored log-probabilities, and one column
        more is all other tokens."""
        tail = self.manifest["tail"]
        logprobs = self.teacher.targets(batch).logprobs.flatten(0, -2)[batch["valid_rows"]].float()
        rest = (1 - logprobs.double().exp().sum(-1, keepdim=True)).clamp_min(1e-30).log().to(logprobs)
        z = torch.cat([logprobs, rest], -1).clamp_min(-80.0)
        ids = torch.arange(logprobs.shape[-1], device=z.device, dtype=torch.int32).expand(logprobs.shape)
        one = torch.eye(z.shape[-1], device=z.device)
        kinds = [term.type.removesuffix("_kl") for term in terms]
        values = [FusedTopKKLLoss(kind, tail)(z, one, ids, logprobs) for kind in kinds]
        return f"the stored {logprobs.shape[-1]} tokens ({tail})", worst_of(values)

    def same_tokens(self, batch: Batch, columns: int, student_rows: int) -> Verdict:
        """Also whether what is stored of a place is of the token that stands there."""
        fine, detail = super().same_tokens(batch, columns, student_rows)
        if not fine:
            return fine, detail
        expected = shifted(batch["labels"]).flatten()[batch["valid_rows"]]
        stored = self.stored((), batch)
        if int(stored["ids"].max()) >= self.manifest["vocabulary"]:
            return False, f"a stored id is not below {self.manifest['vocabulary']:,}"
        if self.manifest["tail"] == "sampled" or self.temperature != 1.0:
            return True, f"{detail}; {len(expected)} places found by their documents' tokens"
        matches = stored["ids"] == expected[:, None]
        off = torch.where(matches, stored["logprobs"].float() - stored["label_logprob"].float()[:, None], 0.0)
        worst = off.abs().max().item() if len(off) else 0.0
        if worst > STORED:
            return False, f"the stored log-probabilities of the tokens that stand here are off by {worst:.1e}"
        where = "cache" if any("cached_ids" in name for name in batch) else "answer"
        count = int(matches.any(-1).sum())
        return True, f"{detail}; {len(expected)} places found in the {where}, {count} of them with the token there"
