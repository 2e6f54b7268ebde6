"""Reference loss against K stored tokens per position, from a cache's files."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from distill_kernels import FusedTopKKLLoss, LossTerm
from torch import nn

from distill.core.labels import IGNORE_INDEX
from distill.doctor.reference import INPUTS, Reference, Verdict, largest_magnitude
from distill.doctor.reference_loss import reference_top_k_loss, shift_left, with_sampled_tail
from distill.doctor.remote_outputs import as_read, remote_tokens
from distill.doctor.rows import DoctorRow
from distill.objectives.targets import Batch
from distill.objectives.top_k import TopKFormat
from distill.objectives.top_k_encoding import LEAST_TAIL
from distill.recipe.loss import Loss
from distill.teachers.backends.stored.store import Fills, Store
from distill.teachers.backends.stored.teacher import StoredTeacher
from distill.teachers.base import Teacher

STORED = 0.05  # largest rounding error of a stored half-precision log-probability, nats


class TopKReference(Reference):
    """Reference of K stored tokens."""

    @property
    def manifest(self) -> Mapping[str, Any]:
        return self.teacher.format.manifest

    @property
    def temperature(self) -> float:
        """Return the temperature that the tokens were stored at."""
        return float(self.manifest["temperature"])

    def at_temperature_2(self) -> Teacher:
        """Return the teacher with its stored probabilities taken as those at temperature 2, or computed there."""
        manifest = {**self.manifest, "temperature": 2.0}
        if self.teacher.models:
            return StoredTeacher(Store(None, Fills(manifest)), self.teacher.inner, device=self.teacher.device)
        teacher = copy.copy(self.teacher)
        teacher.format = TopKFormat(manifest)
        return teacher

    def stored(self, rows: Sequence[DoctorRow], batch: Batch) -> Mapping[str, torch.Tensor]:
        """`ids`, `logprobs` and `tail` of the learned positions: of rows, or, without any, of what the batch holds."""
        inner, read = as_read(self.teacher, rows)
        return remote_tokens(inner, read, batch if inner is self.teacher else self.teacher.inner_batch(batch))

    def loss(
        self, student: nn.Module, rows: Sequence[DoctorRow], batch: Batch, loss: Loss, columns: int | None
    ) -> torch.Tensor:
        """Return the loss from the student's full logits, cut to the columns that the tokens were taken from."""
        labels = shift_left(batch["labels"])
        keep = labels != IGNORE_INDEX
        z_s = student(**{name: batch[name] for name in INPUTS}, use_cache=False).logits[keep]
        stored = self.stored(rows, batch)
        tail = self.manifest["tail"]
        ids = stored["ids"].long()
        probabilities = stored["logprobs"].double().exp()
        if tail != "sampled":  # rounding changed their sum; the separately stored tail is exact
            share = 1 - stored["tail"].double().clamp_min(LEAST_TAIL).exp()
            probabilities = probabilities * (share / probabilities.sum(-1))[:, None]
        z_s = z_s[:, : columns or self.manifest["vocabulary"]]
        term = loss.tailed
        if term is not None:
            log_t = torch.zeros_like(z_s, dtype=self.dtype).scatter(-1, ids, probabilities.log().to(self.dtype))
            label = labels[keep][:, None]
            log_t = log_t.scatter(
                -1,
                label,
                torch.where(
                    (ids == label).any(-1, keepdim=True),
                    log_t.gather(-1, label),
                    stored["label_logprob"].to(self.dtype)[:, None],
                ),
            )
            z_s = z_s.to(self.dtype)
            return term.weight * with_sampled_tail(z_s, z_s.log_softmax(-1), log_t, ids, labels[keep]).mean()
        return reference_top_k_loss(z_s, (ids, probabilities), tail, labels[keep], loss, self.dtype)

    def from_itself(self, batch: Batch, terms: Sequence[LossTerm]) -> tuple[str, float]:
        """Compare the stored tokens with a student that equals them.

        Its logits are the stored log-probabilities, with one more column for all other tokens.
        """
        tail = self.manifest["tail"]
        logprobs = self.teacher.targets(batch).logprobs.flatten(0, -2)[batch["valid_rows"]].float()
        rest = (1 - logprobs.double().exp().sum(-1, keepdim=True)).clamp_min(1e-30).log().to(logprobs)
        z = torch.cat([logprobs, rest], -1).clamp_min(-80.0)
        ids = torch.arange(logprobs.shape[-1], device=z.device, dtype=torch.int32).expand(logprobs.shape)
        one = torch.eye(z.shape[-1], device=z.device)
        kinds = [term.type.removesuffix("_kl") for term in terms]
        values = [FusedTopKKLLoss(kind, tail)(z, one, ids, logprobs) for kind in kinds]
        return f"the stored {logprobs.shape[-1]} tokens ({tail})", largest_magnitude(values)

    def same_tokens(self, batch: Batch, columns: int, student_rows: int) -> Verdict:
        """Return whether also the stored entries of each position belong to its token."""
        fine, detail = super().same_tokens(batch, columns, student_rows)
        if not fine:
            return fine, detail
        expected = shift_left(batch["labels"]).flatten()[batch["valid_rows"]]
        stored = self.stored((), batch)
        if int(stored["ids"].max()) >= self.manifest["vocabulary"]:
            return False, f"expected stored ids below {self.manifest['vocabulary']:,}, got a larger one"
        if self.manifest["tail"] == "sampled" or self.temperature != 1.0:
            return True, f"{detail}; {len(expected)} positions found by their documents' tokens"
        matches = stored["ids"] == expected[:, None]
        off = torch.where(matches, stored["logprobs"].float() - stored["label_logprob"].float()[:, None], 0.0)
        worst = off.abs().max().item() if len(off) else 0.0
        if worst > STORED:
            return False, f"the stored log-probabilities of these tokens have an error of {worst:.1e}"
        where = "cache" if any("cached_" in name for name in batch) else "server's output"
        count = int(matches.any(-1).sum())
        return True, f"{detail}; {len(expected)} positions found in the {where}, {count} of them with their own token"
