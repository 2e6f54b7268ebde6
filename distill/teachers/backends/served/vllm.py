"""A vLLM server as a teacher: K log-probabilities of every prompt token, by its `prompt_logprobs`.

    POST /v1/completions {"model": ..., "prompt": [[ids], ...], "max_tokens": 1, "prompt_logprobs": K, "temperature": 0}

The answer has a list for each prompt, with an entry per token: null for the first, which nothing predicts, then a
mapping of token ids (as text) to `{"logprob": ..., "rank": ...}`: the K most probable, and the prompt's own token where
it is none of them. So entry i is predicted at token i - 1. They are of the whole distribution at temperature 1; the
probability beyond the K is the tail. No endpoint reports the largest K: more than `--max-logprobs` (20 unless raised)
is refused with a 400, so each server is queried for one token before a run begins.

vLLM batches whatever requests are open, so that two answers to the same query may differ in their last bits: a resumed
run is not identical to the bit. Hidden states are read by `vllm_hidden.py`. Tests run it against vLLM 0.32.0 on CPUs.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from distill.core.errors import TeacherUnavailableError
from distill.teachers.backends.served.client import Servers
from distill.teachers.backends.served.protocol import JSON, PackedTensor, TargetRequest, documents
from distill.teachers.backends.served.teacher_client import (
    ServerProtocol,
    TargetSpec,
    TargetTensors,
    WireRequest,
    require_valid,
)

# seconds between two checks; of silence until servers count as dead
HEALTH_SECONDS = 1.0
DEAD_SECONDS = 15.0
COMPLETIONS = "/v1/completions"
MOST_IDS = 1 << 31  # token ids are below
LEAST = -1e4  # vLLM sends -9999 for a logprob of minus infinity
# of one token; of a sum of probabilities: above is no rounding
MOST_LOGPROB = 1e-4
MOST_SUM = 1 + 1e-3


def served_model(servers: Servers) -> dict[str, object]:
    """Return id, root and max_model_len of the model that all servers serve.

    Raises:
        ValueError: one is no vLLM, or they differ.
        TeacherUnavailableError: none answers.
    """
    found: dict[str, dict[str, object]] = {}
    for url, body in servers.of_each("/v1/models").items():
        try:
            (model, *_) = json.loads(body)["data"]
            found[url] = {name: model.get(name) for name in ("id", "root", "max_model_len")}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(f"teacher.url: {url}: expected vLLM's list of models, got {body[:60]!r}") from None
    (first, identity), *others = found.items()
    for url, other in others:
        if other != identity:
            raise ValueError(f"teacher.url: expected {identity['id']!r} of {first} on {url} too, got {other['id']!r}")
    return identity


def length_problems(model: Mapping[str, object], max_length: int, extra: int) -> list[str]:
    """Return a problem where documents may be longer than a served model takes.

    Args:
        model: Entry of vLLM's /v1/models from `served_model`.
        max_length: Maximum length of documents in tokens (`data.max_length`).
        extra: Tokens of a request in addition to its document, for the one that vLLM always generates.
    """
    most = model["max_model_len"]
    if not isinstance(most, int) or max_length + extra <= most:
        return []
    return [
        f"data.max_length: expected at most {most - extra}, since vLLM was started with --max-model-len {most}, got "
        f"{max_length}; lower it, or start vLLM with --max-model-len {max_length + extra}"
    ]


class DeathWatch:
    """Detection of dead servers: a vLLM that died does not restart by itself, and `teacher.timeout` is for one that is
    slow.

    Args:
        servers: queried at /health, while none of them takes a request.
        of_all: Whether they count as dead only when none of them answers.
    """

    def __init__(self, servers: Servers, *, of_all: bool = True) -> None:
        self.servers = servers
        self.of_all = of_all
        self._lock = threading.Lock()
        self._silent_since: float | None = None
        self._looked = time.monotonic()

    def __call__(self) -> str | None:
        """Return why no answer will come any more; None while one may."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked < HEALTH_SECONDS:
                return None
            if now - self._looked > DEAD_SECONDS:  # a silence before the last answers is another one
                self._silent_since = None
            self._looked = now
            fault = self.servers.silence(of_all=self.of_all)
            if fault is None:
                self._silent_since = None
                return None
            self._silent_since = now if self._silent_since is None else self._silent_since
            silent = now - self._silent_since
            if silent < DEAD_SECONDS:
                return None
            who = "no vLLM server has" if self.of_all else "a vLLM server has not"
            return f"teacher.url: {who} answered at /health for {silent:.0f} s ({fault})"


class VllmLogprobs(ServerProtocol):
    """The completions endpoint of vLLM with `prompt_logprobs`.

    Args:
        spec: Requested outputs; vLLM samples no tail tokens, so that `sampled` becomes `bucket`.
    """

    content_type = JSON

    def __init__(self, spec: TargetSpec) -> None:
        assert spec.top_k is not None
        tail = "bucket" if spec.tail == "sampled" else spec.tail
        self.spec = spec._replace(tail=tail, deterministic=False)
        self.model = ""

    def identity(self, servers: Servers) -> dict[str, object]:
        """Return the identity of the served model, which must be the same on all servers.

        Raises:
            ValueError: a server is no vLLM, or they differ.
            TeacherUnavailableError: one gives fewer log-probabilities than are requested.
        """
        identity = served_model(servers)
        self.model = str(identity["id"])
        least = TargetRequest(np.zeros((1, 2), np.int32), None, np.zeros(1, np.int32))
        for body in servers.of_each(COMPLETIONS, "POST", self.question(least), JSON).values():
            answer = torch.frombuffer(bytearray(body or b"?"), dtype=torch.uint8)
            require_valid(self.read(answer, least), 1, self.spec, self.field)
        servers.ended = DeathWatch(servers)  # from here on: a server that still starts is waited for
        return {**identity, "protocol": "vllm"}

    def question(self, query: TargetRequest) -> bytes:
        return json.dumps(
            {
                "model": self.model,
                "prompt": [piece.ids.tolist() for piece in _prompts(query)],
                "max_tokens": 1,
                "temperature": 0.0,
                "prompt_logprobs": self.spec.top_k,
            }
        ).encode()

    def requests(self, query: TargetRequest) -> Sequence[WireRequest]:
        return [WireRequest(COMPLETIONS, self.question(query), query)]

    def read(self, body: torch.Tensor, query: TargetRequest) -> TargetTensors:
        pieces = _prompts(query)
        k = self.spec.top_k or 0
        try:
            choices = sorted(json.loads(body.numpy().tobytes())["choices"], key=lambda choice: int(choice["index"]))
            if len(choices) != len(pieces):
                raise TeacherUnavailableError(f"teacher.url: expected {len(pieces)} choices, got {len(choices)}")
            rows = [
                _entry(choice["prompt_logprobs"][place + 1], int(piece.ids[place + 1]), k, self.spec.columns)
                for choice, piece in zip(choices, pieces, strict=True)
                for place in _checked(choice, piece).query.tolist()
            ]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, OverflowError) as error:
            fault = f"{type(error).__name__}: {error}"
            raise TeacherUnavailableError(f"teacher.url: a response that is not vLLM's: {fault}") from None
        ids, logprobs, label = (np.array(part) for part in zip(*rows, strict=True))
        _require_log_probabilities(logprobs, label)
        return _completed(
            torch.from_numpy(ids).int(), torch.from_numpy(logprobs).float(), torch.from_numpy(label).float()
        )


def _require_log_probabilities(logprobs: np.ndarray, label: np.ndarray) -> None:
    """Check that numbers [M, K] and [M] can be log-probabilities: vLLM may be configured to send logits instead."""
    most = float(max(logprobs.max(), label.max()))
    total = float(np.exp(logprobs.astype(np.float64)).sum(-1).max())
    if most > MOST_LOGPROB or total > MOST_SUM:
        got = f"one of {most:.4g}" if most > MOST_LOGPROB else f"probabilities that sum to {total:.4g}"
        raise TeacherUnavailableError(
            f"teacher.url: expected log-probabilities, got {got}: the server sends logits; start vLLM with "
            "--logprobs-mode raw_logprobs"
        )


def _prompts(query: TargetRequest) -> list[PackedTensor]:
    """Return the documents up to the last trained token, whose log-probability is requested."""
    return documents(query, 0, beyond=1)


def _checked(choice: Mapping[str, Any], piece: PackedTensor) -> PackedTensor:
    """Return the piece, once the answer has an entry for each of its tokens, the first of them empty."""
    entries = choice["prompt_logprobs"]
    if len(entries) != len(piece.ids) or entries[0] is not None:
        raise TeacherUnavailableError(
            f"teacher.url: prompt_logprobs: expected null and {len(piece.ids) - 1} entries, got {len(entries)}, the "
            f"first {'null' if entries and entries[0] is None else 'not null: they are shifted by one'}"
        )
    return piece


def _entry(entry: Mapping[str, Any], label: int, k: int, columns: int) -> tuple[list[int], list[float], float]:
    """Return the top K ids and log-probabilities in order, and the label's log-probability, of a token's mapping."""
    known = {int(token): max(float(value["logprob"]), LEAST) for token, value in entry.items()}
    wrong = next((token for token in known if not 0 <= token < MOST_IDS), None)
    if wrong:
        raise TeacherUnavailableError(f"teacher.url: prompt_logprobs: expected token ids from 0 on, got {wrong}")
    if label not in known:
        raise TeacherUnavailableError(
            "teacher.url: prompt_logprobs lack the prompt's own token: they are of other positions"
        )
    likeliest = sorted(((token, value) for token, value in known.items() if token < columns), key=lambda one: -one[1])[
        :k
    ]
    if len(likeliest) < k:
        raise TeacherUnavailableError(f"teacher.top_k: expected {k} log-probabilities a token, got {len(likeliest)}")
    return [token for token, _ in likeliest], [value for _, value in likeliest], known[label]


def _completed(ids: torch.Tensor, logprobs: torch.Tensor, label: torch.Tensor) -> TargetTensors:
    """Return the answer with the tail and the entropy over the K and the tail, a lower bound of the full entropy."""
    tail = torch.log1p(-logprobs.double().exp().sum(-1).clamp_max(1 - 1e-6)).float()
    outcomes = torch.cat([logprobs, tail[:, None]], -1).double()
    entropy = -(outcomes.exp() * outcomes).sum(-1).float()
    return {"ids": ids, "logprobs": logprobs, "tail": tail, "entropy": entropy, "label_logprob": label}
