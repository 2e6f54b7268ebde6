"""Conversion of token rows into queries to servers, and of the answers into tensors; one client a protocol."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import torch

from distill.core.errors import TeacherUnavailableError
from distill.objectives.row_packing import unpack_top_k
from distill.recipe import Recipe, ServedTeacherConfig
from distill.teachers.backends.served.client import Servers, with_query
from distill.teachers.backends.served.protocol import ProtocolError, TargetRequest, hidden_of, tensors_of
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
        """Return the outputs that a recipe requests."""
        section = recipe.teacher
        assert isinstance(section, ServedTeacherConfig)
        return TargetSpec(
            section.top_k,
            columns,
            hidden,
            dtype,
            default_tail(recipe.loss),
            recipe.loss.temperature,
            section.transfer_dtype,
            section.deterministic,
        )

    def nothing(self) -> TargetTensors:
        """Return the answer for no positions."""
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


class Answer(Protocol):
    """Pending answer."""

    def result(self) -> TargetTensors:
        """Wait for `hidden` [M, H]; or `ids` int32 [M, K], `logprobs`, `tail`, `entropy`, `label_logprob`, as in a
        cache.

        Raises:
            TeacherUnavailableError: the answer will not come, or has other contents.
        """
        ...


class TeacherClient(Protocol):
    """Client of one server protocol.

    Attributes:
        spec: Outputs requested for each position.
        most_logits: Maximum number of positions of a response with logits; 0 where the server sends none.
        field: Field of the recipe that names the servers, for error messages.
    """

    spec: TargetSpec
    most_logits: int = 0
    field: str = "teacher.url"

    def ask(self, query: TargetRequest) -> Answer:
        """Send a query; return without waiting for its answer."""
        ...

    def exact(self, query: TargetRequest) -> TargetTensors:
        """Return `hidden` unrounded, whatever dtype `spec` has for sending it."""
        return self.ask(query).result()

    def logits(self, query: TargetRequest) -> torch.Tensor:
        """Return fp32 logits [M, V] of the model's own forward, for at most `most_logits` rows."""
        ...

    def parity(self, query: TargetRequest) -> str | None:
        """Compare with the server's own numbers where it sends no logits; return a summary, None without a comparison.

        Raises:
            ValueError: they differ.
        """
        return None

    def cost(self) -> float:
        """Return the bytes received per trained token."""
        ...

    def close(self) -> None:
        """Stop sending queries."""
        return


class HttpTeacherClient(TeacherClient):
    """A client over HTTP.

    Attributes:
        servers: HTTP connections to the servers.
    """

    servers: Servers

    def logits(self, query: TargetRequest) -> torch.Tensor:
        return tensors_of(self.servers.fetch("POST", "/v1/logits", query.body()))["logits"]

    def cost(self) -> float:
        return self.servers.received / max(self.servers.positions, 1)

    def close(self) -> None:
        self.servers.close()


class DistillClient(HttpTeacherClient):
    """A client of `distill serve`."""

    def __init__(self, servers: Servers, spec: TargetSpec, most_logits: int) -> None:
        self.servers = servers
        self.spec = spec
        self.most_logits = most_logits

    def exact(self, query: TargetRequest) -> TargetTensors:
        return DistillClient(self.servers, self.spec._replace(send="auto", deterministic=True), 0).ask(query).result()

    def ask(self, query: TargetRequest) -> Future[TargetTensors]:
        spec = self.spec
        params = (
            {"dtype": spec.send}
            if spec.top_k is None
            else {"top_k": spec.top_k, "columns": spec.columns, "tail": spec.tail, "temperature": spec.temperature}
        )
        path = with_query("/v1/targets", deterministic=int(spec.deterministic), **params)
        return self.servers.submit(path, query.body(), len(query.rows), lambda body: self.read(body, query))

    def read(self, body: torch.Tensor, query: TargetRequest) -> TargetTensors:
        """Return the tensors in an answer's body.

        Raises:
            TeacherUnavailableError: they are not what was requested.
        """
        spec = self.spec
        try:
            answer = tensors_of(body)
            if spec.top_k is None:
                values = {"hidden": hidden_of(answer, spec.dtype)}
            else:
                values = unpack_top_k(answer, spec.columns)
        except (ProtocolError, KeyError, RuntimeError, ValueError) as error:
            raise TeacherUnavailableError(
                f"teacher.url: an invalid response: {type(error).__name__}: {error}"
            ) from None
        return require_sound(values, len(query.rows), spec)


def require_sound(
    values: TargetTensors, positions: int, spec: TargetSpec, field: str = TeacherClient.field
) -> TargetTensors:
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
