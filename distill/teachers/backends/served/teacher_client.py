"""Client of a teacher's servers: rows of tokens become requests, and their answers the targets of each position.

There is one client. What differs between `distill serve`, vLLM's log-probabilities and vLLM's hidden states (the
requests for a query, and how an answer is read) is a `ServerProtocol`: `DistillProtocol` here, `VllmLogprobs` in
`vllm.py`, `VllmHiddenStates` in `vllm_hidden.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch

from distill.core.errors import TeacherUnavailableError
from distill.objectives.row_packing import unpack_top_k
from distill.recipe import Recipe, ServedTeacherConfig
from distill.teachers.backends.served.client import Servers, with_query
from distill.teachers.backends.served.protocol import (
    BINARY,
    ProtocolError,
    TargetRequest,
    hidden_of,
    tensors_of,
)
from distill.teachers.backends.stored.settings import default_tail

TargetTensors = dict[str, torch.Tensor]


class TargetSpec(NamedTuple):
    """Outputs that are requested for each position.

    Attributes:
        top_k: Number of tokens K of each distribution; None for hidden states.
        columns: Number of vocabulary columns that K tokens are taken from; all V for hidden states.
        hidden: Hidden size H.
        dtype: Dtype of hidden states and head.
        tail: Selection of the K tokens and treatment of the others, one of `TAILS`.
        temperature: Softmax temperature of the K log-probabilities.
        send: Dtype of hidden states in the response: `auto` or `fp8`.
        deterministic: True if the server computes each request in a forward pass of its own.
    """

    top_k: int | None
    columns: int
    hidden: int
    dtype: torch.dtype
    tail: str
    temperature: float
    send: str
    deterministic: bool

    @staticmethod
    def by(recipe: Recipe, columns: int, hidden: int, dtype: torch.dtype) -> TargetSpec:
        section = recipe.teacher
        assert isinstance(section, ServedTeacherConfig)
        return TargetSpec(
            section.top_k,
            columns,
            hidden,
            dtype,
            default_tail(recipe.loss),
            recipe.loss.temperatures.teacher,
            section.transfer_dtype,
            section.deterministic,
        )

    def nothing(self) -> TargetTensors:
        if self.top_k is None:
            return {"hidden": torch.zeros(0, self.hidden, dtype=self.dtype)}
        empty = torch.zeros(0)
        return {
            "ids": torch.zeros(0, self.top_k, dtype=torch.int32),
            "logprobs": torch.zeros(0, self.top_k),
            "tail": empty,
            "entropy": empty,
            "label_logprob": empty,
        }

    def manifest(self, scale: float, softcap: float | None) -> dict[str, object]:
        """Return these settings as a cache's manifest has them, for the format of K tokens."""
        return {
            "kind": "top_k",
            "k": self.top_k,
            "tail": self.tail,
            "temperature": self.temperature,
            "scale": scale,
            "softcap": softcap,
            "vocabulary": self.columns,
            "hidden": self.hidden,
            "dtype": "float16",
        }


class WireRequest(NamedTuple):
    """One HTTP request.

    Attributes:
        path: URL path with its query string.
        query: Positions that the answer is for.
    """

    path: str
    body: bytes
    query: TargetRequest


class ServerProtocol:
    """What one kind of server is sent, and how its answers are read.

    Attributes:
        spec: Outputs requested for each position.
        most_logits: Maximum number of positions of a response with logits; 0 where the server sends none.
        field: Field of the recipe that names the servers, for error messages.
    """

    spec: TargetSpec
    content_type = BINARY
    most_logits = 0
    field = "teacher.url"

    def requests(self, query: TargetRequest) -> Sequence[WireRequest]:
        """Return the requests whose answers, one after the other, are those for the query's positions."""
        raise NotImplementedError

    def read(self, body: torch.Tensor, query: TargetRequest) -> TargetTensors:
        """Return the tensors in an answer's body, uint8 [bytes].

        Raises:
            TeacherUnavailableError: they are not what was requested.
        """
        raise NotImplementedError

    def unrounded(self) -> ServerProtocol:
        """Return the protocol that requests hidden states unrounded, whatever dtype `spec` has for sending them."""
        return self

    def parity(self, client: TeacherClient, query: TargetRequest) -> str | None:
        """Compare with the server's own numbers where it sends no logits; return a summary, None without a comparison.

        Raises:
            ValueError: they differ.
        """
        return None

    def file_bytes(self) -> int:
        """Return the bytes that were received in files, apart from HTTP."""
        return 0


class ServedTargets(NamedTuple):
    """Pending answers to the requests of a query."""

    parts: Sequence[Future[TargetTensors]]

    def result(self) -> TargetTensors:
        """Wait for `hidden` [M, H]; or `ids` int32 [M, K], `logprobs`, `tail`, `entropy`, `label_logprob`, as in a
        cache.

        Raises:
            TeacherUnavailableError: the answer will not come, or has other contents.
        """
        parts = [part.result() for part in self.parts]
        if len(parts) == 1:
            return parts[0]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


class TeacherClient:
    """Client of a teacher's servers.

    Args:
        servers: HTTP connections to them.
        protocol: The protocol that they speak.
    """

    def __init__(self, servers: Servers, protocol: ServerProtocol) -> None:
        self.servers = servers
        self.protocol = protocol

    @property
    def spec(self) -> TargetSpec:
        return self.protocol.spec

    def ask(self, query: TargetRequest) -> ServedTargets:
        """Send a query; return without waiting for its answer."""
        return ServedTargets([self._submit(request) for request in self.protocol.requests(query)])

    def _submit(self, request: WireRequest) -> Future[TargetTensors]:
        protocol = self.protocol
        positions = len(request.query.rows)

        def read(body: torch.Tensor) -> TargetTensors:  # in the thread that received it
            return require_valid(protocol.read(body, request.query), positions, protocol.spec, protocol.field)

        return self.servers.submit(request.path, request.body, positions, read, protocol.content_type)

    def exact(self, query: TargetRequest) -> TargetTensors:
        return TeacherClient(self.servers, self.protocol.unrounded()).ask(query).result()

    def logits(self, query: TargetRequest) -> torch.Tensor:
        """Return fp32 logits [M, V] of the model's own forward, for at most `protocol.most_logits` rows."""
        return tensors_of(self.servers.fetch("POST", "/v1/logits", query.body()))["logits"]

    def parity(self, query: TargetRequest) -> str | None:
        """Compare with the server's own numbers where it sends no logits; see `ServerProtocol.parity`."""
        return self.protocol.parity(self, query)

    def cost(self) -> float:
        """Return the bytes received per trained token."""
        return (self.servers.received + self.protocol.file_bytes()) / max(self.servers.positions, 1)

    def close(self) -> None:
        self.servers.close()


class DistillProtocol(ServerProtocol):
    """The protocol of `distill serve`; see `protocol.py`."""

    def __init__(self, spec: TargetSpec, most_logits: int, field: str = ServerProtocol.field) -> None:
        self.spec = spec
        self.most_logits = most_logits
        self.field = field

    def requests(self, query: TargetRequest) -> Sequence[WireRequest]:
        spec = self.spec
        params = (
            {"dtype": spec.send}
            if spec.top_k is None
            else {"top_k": spec.top_k, "columns": spec.columns, "tail": spec.tail, "temperature": spec.temperature}
        )
        path = with_query("/v1/targets", deterministic=int(spec.deterministic), **params)
        return [WireRequest(path, query.body(), query)]

    def read(self, body: torch.Tensor, query: TargetRequest) -> TargetTensors:
        spec = self.spec
        try:
            answer = tensors_of(body)
            if spec.top_k is None:
                return {"hidden": hidden_of(answer, spec.dtype)}
            return unpack_top_k(answer, spec.columns)
        except (ProtocolError, KeyError, RuntimeError, ValueError) as error:
            raise TeacherUnavailableError(
                f"{self.field}: an invalid response: {type(error).__name__}: {error}"
            ) from None

    def unrounded(self) -> DistillProtocol:
        return DistillProtocol(self.spec._replace(send="auto", deterministic=True), self.most_logits, self.field)


def require_valid(values: TargetTensors, positions: int, spec: TargetSpec, field: str) -> TargetTensors:
    """Return an answer, once its shapes are the requested ones and it is finite where it must be.

    Raises:
        TeacherUnavailableError: naming what is not.
    """
    k = spec.top_k
    shapes: Mapping[str, tuple[int, ...]] = (
        {"hidden": (positions, spec.hidden)}
        if k is None
        else {
            "ids": (positions, k),
            "logprobs": (positions, k),
            "tail": (positions,),
            "entropy": (positions,),
            "label_logprob": (positions,),
        }
    )
    for name, shape in shapes.items():
        if tuple(values[name].shape) != shape:
            raise TeacherUnavailableError(
                f"{field}: a response's {name}: expected {shape}, got {tuple(values[name].shape)}"
            )
        value = values[name]
        # most answers pass this check, which reads the memory once
        if not value.is_floating_point() or bool(value.sum().isfinite()):
            continue
        # a probability may be 0, and its logarithm -inf
        fine = value.isfinite() | (value == -torch.inf) if k is not None else value.isfinite()
        if not bool(fine.all()):
            raise TeacherUnavailableError(
                f"{field}: a response's {name} is NaN or infinite at {int((~fine).sum())} places"
            )
    if k is not None and positions:
        low = int(values["ids"].min())
        high = int(values["ids"].max())
        if low < 0 or high >= spec.columns:
            raise TeacherUnavailableError(
                f"{field}: a response's ids: expected 0 to {spec.columns - 1}, got {low} to {high}"
            )
    return values
