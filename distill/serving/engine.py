"""A loaded teacher that computes outputs for requests: several packed into one forward pass, or one alone.

The last bits of an output depend on the other rows of its forward pass. Documents of several requests are packed into
rows as long as the longest of them, each with positions that restart (so that nothing is spent on padding, nor on
tokens after the last one that is requested). A `deterministic` request is computed alone, in its own rows: its bits do
not depend on other requests, and equal those of the same model in the trainer's own process.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from distill.core.environment import environment
from distill.data.packing import best_fit
from distill.data.token_cache import tokenizer_hash
from distill.models.head import HeadWeights, unwrap_peft
from distill.models.patch.packed import isolates_documents
from distill.models.precision.host_copy import HostCopy, to_device
from distill.objectives.row_packing import FP8, hidden_bytes, pack_hidden, pack_top_k, unpack_hidden
from distill.objectives.top_k_encoding import Encoding, encode, log_probabilities
from distill.recipe import TeacherConfig
from distill.teachers.backends.local import LoadedTeacher
from distill.teachers.backends.served.protocol import (
    DTYPES,
    FILES,
    PROTOCOL,
    Identity,
    ProtocolError,
    TargetRequest,
    documents,
    head_hash,
    packed_rows,
)
from distill.teachers.backends.stored.settings import MAX_TOP_K, TAILS
from distill.teachers.identity import model_name, teacher_identity

LOGITS_BYTES = 64 << 20  # maximum size of a response of /v1/logits
FP8_TOKENS = 512  # tokens that the cost of fp8 is measured on


class RequestOptions(NamedTuple):
    """Options of a request.

    Attributes:
        top_k: tokens of each distribution; None for hidden states.
        columns: columns of the vocabulary that they are taken from; 0 for all.
        tail: selection of the K tokens and treatment of the others, one of `TAILS`.
        temperature: temperature of their probabilities.
        dtype: dtype of the numbers; `auto` for hidden states in their own dtype and K tokens in float16.
        deterministic: whether it is computed alone.
        logits: return the model's own logits, for a parity check.
    """

    top_k: int | None = None
    columns: int = 0
    tail: str = "bucket"
    temperature: float = 1.0
    dtype: str = "auto"
    deterministic: bool = False
    logits: bool = False

    def checked(self, rows: int) -> RequestOptions:
        """Return validated options with the columns filled in."""
        columns = self.columns or rows
        hidden = tuple(dtype for dtype in DTYPES if dtype != "float16")
        allowed = hidden if self.top_k is None else ("auto", "float16", "float32")
        if not 0 < columns <= rows:
            raise ProtocolError(f"columns: expected 1 to {rows}, got {columns}")
        if self.top_k is not None and not 0 < self.top_k <= min(MAX_TOP_K, columns):
            raise ProtocolError(f"top_k: expected 1 to {min(MAX_TOP_K, columns)}, got {self.top_k}")
        if self.tail not in TAILS:
            raise ProtocolError(f"tail: expected one of {', '.join(TAILS)}, got {self.tail[:40]!r}")
        if not 1e-3 <= self.temperature <= 1e3:
            raise ProtocolError(f"temperature: expected 0.001 to 1000, got {self.temperature}")
        if self.dtype not in allowed:
            raise ProtocolError(f"dtype: expected one of {', '.join(allowed)}, got {self.dtype[:40]!r}")
        return self._replace(columns=columns)


class RowsRequest(NamedTuple):
    """A validated request."""

    query: TargetRequest
    options: RequestOptions

    @property
    def alone(self) -> bool:
        """Return whether it must not share a forward pass."""
        return self.options.deterministic or self.options.logits

    def answer_bytes(self, identity: Identity) -> int:
        """Return the size of the teacher's response in bytes, at 8 per top-K token and 12 for the rest of a row."""
        if self.options.logits:
            row = 4 * identity.rows
        elif self.options.top_k is not None:
            row = 8 * self.options.top_k + 12
        else:
            row = hidden_bytes(identity.hidden, identity.dtype if self.options.dtype == "auto" else self.options.dtype)
        return row * len(self.query.rows)


RowTargets = dict[str, torch.Tensor]


class ServingEngine:
    """One teacher, queried by one thread at a time.

    Args:
        teacher: teacher on its device, patched and quantised.
        tokenizer: the teacher's; None where there is none.
        template: hash of the chat template that its data are made with; None without one.
        most_tokens: maximum number of tokens in one request.

    Attributes:
        files: configuration and tokenizer, from file name to text.
        forwards: number of forward passes at once: one.
        head: the head's weight and bias on the CPU.
        forward: maps ids and positions int64 [B, S] to hidden states [B, S, H], of which `valid_rows` are read.
    """

    forwards = 1

    def __init__(
        self,
        teacher: LoadedTeacher,
        section: TeacherConfig,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None,
        most_tokens: int,
    ) -> None:
        self.teacher = teacher
        self.model = teacher.model
        self.forward: Callable[[dict[str, torch.Tensor]], torch.Tensor] = teacher.targets  # type: ignore[assignment]
        if teacher.is_collective():
            self.forward = self._forward_together
            # FSDP2 makes its streams in the first forward: only after it can the head be gathered alone, as below
            self.forward({"input_ids": torch.zeros(1, 2, dtype=torch.int64, device=teacher.model.device)})
        with teacher.hidden.head.open() as (weight, bias, _):
            weight = weight.detach()
            bias = None if bias is None else bias.detach()
            if teacher.is_collective():  # gathered in this context only
                weight = weight.clone()
                bias = None if bias is None else bias.clone()
        self.weights = HeadWeights(weight, bias, None)
        self.transform = teacher.hidden.transform
        self.device = self.weights.weight.device
        self.packs = isolates_documents(self.model)
        named = {"weight": self.weights.weight} | ({} if self.weights.bias is None else {"bias": self.weights.bias})
        self.head = {name: tensor.cpu().contiguous() for name, tensor in named.items()}
        self.files = _files(self.model, tokenizer)
        self.identity = self._identity(section, tokenizer, template, most_tokens)
        if not self.packs:
            self.identity.notes["packing"] = "none: this model does not keep documents of one row apart"

    def _identity(
        self, section: TeacherConfig, tokenizer: PreTrainedTokenizerBase, template: str | None, most_tokens: int
    ) -> Identity:
        config = unwrap_peft(self.model).config.get_text_config()  # type: ignore[operator,union-attr]
        rows, width = self.weights.weight.shape
        longest = getattr(config, "max_position_embeddings", None)
        return Identity(
            PROTOCOL,
            model_name(section),
            teacher_identity(section),
            self.teacher.fingerprint(),
            str(self.weights.weight.dtype).removeprefix("torch."),
            section.held,
            rows,
            width,
            head_hash(self.head),
            self.transform.scale,
            self.transform.softcap,
            None if tokenizer is None else tokenizer_hash(tokenizer),
            template,
            hashlib.sha256(json.dumps(self.files, sort_keys=True).encode()).hexdigest(),
            {
                "tokens": most_tokens,
                "document": longest,
                "top_k": MAX_TOP_K,
                "logits": max(LOGITS_BYTES // (4 * rows), 1),
            },
            {"device": str(self.device), **environment(), "fp8_kl": self._fp8_cost(tokenizer, longest or 256)},
        )

    @torch.no_grad()
    def _fp8_cost(self, tokenizer: PreTrainedTokenizerBase, longest: int) -> float:
        """KL(teacher || teacher with hidden states in fp8 on the wire) over some text, in nats per token."""
        if tokenizer is None:
            ids = torch.arange(FP8_TOKENS) * 31 % len(self.weights.weight)
        else:
            ids = torch.tensor(tokenizer(inspect.getsource(textwrap))["input_ids"])[:FP8_TOKENS]
            ids = ids % len(self.weights.weight)
        parts = ids[None].to(self.device).split(min(longest, 256), dim=1)
        hidden = torch.cat([self.forward({"input_ids": part})[0] for part in parts])
        values, scale = pack_hidden(hidden, FP8)
        sent = unpack_hidden(values, scale, hidden.dtype)
        total = 0.0
        columns = len(self.weights.weight)
        for one, other in zip(hidden.split(64), sent.split(64), strict=True):
            pair = (log_probabilities(h, self.weights, self.transform, columns, 1.0)[1] for h in (one, other))
            logp, logq = (logprobs.double() for logprobs in pair)
            total += float((logp.exp() * (logp - logq)).sum())
        return total / len(hidden)

    # ------------------------------------------------------------------ answers

    def answer(self, jobs: Sequence[RowsRequest]) -> list[RowTargets]:
        """Return the outputs for each job; one job alone in its own rows, several packed together.

        On a GPU they are copied asynchronously (`HostCopy`) when this returns.
        """
        return [self._encoded(job, rows) for job, rows in zip(jobs, self.hidden(jobs), strict=True)]

    def hidden(self, jobs: Sequence[RowsRequest]) -> list[torch.Tensor]:
        """Compute the hidden states [M, H] of each job's rows (or logits [M, V], if requested) in one forward."""
        # alone: exactly the rows of the request, whose sums no other request's documents change
        return [self._alone(jobs[0])] if len(jobs) == 1 and jobs[0].alone else self._together(jobs)

    def _forward_together(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = self.teacher.targets(batch)
        with self.teacher.hidden.head.open():  # a head in one unit with the embedding was left gathered by the body
            assert isinstance(hidden, torch.Tensor)
            return hidden

    def _alone(self, job: RowsRequest) -> torch.Tensor:
        batch = {"input_ids": _ids(job.query.ids, self.device)}
        if job.query.positions is not None:
            batch["position_ids"] = _ids(job.query.positions, self.device)
        rows = _ids(job.query.rows, self.device)
        if job.options.logits:
            with torch.no_grad():  # the model's own computation of logits, independent of the trainer's
                logits = self.model(**batch, use_cache=False).logits
        else:
            logits = self.forward({**batch, "valid_rows": rows})
        return logits.flatten(0, 1).index_select(0, rows)

    def _together(self, jobs: Sequence[RowsRequest]) -> list[torch.Tensor]:
        """Compute hidden states [M, H] of each job, in one forward pass of all documents with requested rows."""
        pieces = [piece for number, job in enumerate(jobs) for piece in documents(job.query, number)]
        if not pieces:
            empty = self.weights.weight.new_zeros(0, self.weights.weight.shape[1])
            return [empty] * len(jobs)
        # Documents of all requests are packed into rows as long as the longest: no padding inside rows, and every row
        # full.
        lengths = np.array([len(piece.ids) for piece in pieces])
        groups = best_fit(lengths, int(lengths.max())) if self.packs else [np.array([n]) for n in range(len(pieces))]
        width = max(int(lengths[group].sum()) for group in groups)
        width = max(width, 2)  # a single token would be treated as decoding
        ids, positions = (np.zeros((len(groups), width), np.int64) for _ in range(2))
        places: list[list[np.ndarray]] = [[] for _ in jobs]
        flat = {}
        for row, group in enumerate(groups):
            at = 0
            for number in group.tolist():
                piece = pieces[number]
                stop = at + len(pieces[number].ids)
                ids[row, at:stop] = piece.ids
                positions[row, at:stop] = np.arange(stop - at)
                # where the document's requested rows lie in the flattened [rows, width] output
                flat[number] = row * width + at + piece.query
                at = stop
            # Padding at a row's end is a document of its own: positions restart, so that nothing attends across.
            positions[row, at:] = np.arange(width - at)
        for number, piece in enumerate(pieces):
            # back to the order of each job's own documents, whatever rows they were packed into
            places[piece.job].append(flat[number])
        batch = {"input_ids": _ids(ids, self.device)}
        if self.packs:
            batch["position_ids"] = _ids(positions, self.device)
        batch["valid_rows"] = _ids(np.concatenate(list(flat.values())), self.device)
        hidden = self.forward(batch).flatten(0, 1)
        nothing = [np.zeros(0, np.int64)]
        return [hidden.index_select(0, _ids(np.concatenate(mine or nothing), self.device)) for mine in places]

    def _encoded(self, job: RowsRequest, rows: torch.Tensor) -> RowTargets:
        options = job.options
        if options.logits:
            return HostCopy({"logits": rows.float()})
        if options.top_k is None:
            return HostCopy(packed_rows(rows, options.dtype))
        generator = None
        if options.tail == "sampled":  # seeded by the request, so that equal requests have equal responses
            digest = hashlib.sha256(job.query.body()).digest()
            generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest[:7], "little"))
        labels = _ids(job.query.labels, self.device)
        encoding = Encoding(options.columns, options.top_k, options.tail, options.temperature)
        values = encode(rows, self.weights, self.transform, labels.clamp_max(options.columns - 1), encoding, generator)
        dtype = torch.float16 if options.dtype == "auto" else getattr(torch, options.dtype)
        return pack_top_k(values._asdict(), options.columns, dtype)


def _ids(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return to_device(torch.from_numpy(array.astype(np.int64)), device)


def _files(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    with TemporaryDirectory() as name:
        folder = Path(name)
        unwrap_peft(model).config.save_pretrained(folder)  # type: ignore[union-attr,operator]
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.iterdir()) if path.name in FILES}
