"""A vLLM server's hidden states, by its connector: one safetensors file a request, in a folder that both can reach.

    vllm serve MODEL --no-enable-chunked-prefill
        --speculative_config {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config":
                              {"hf_config": {"eagle_aux_hidden_state_layer_ids": [LAYERS OF THE MODEL]}}}
        --kv_transfer_config {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
                              "kv_connector_extra_config": {"shared_storage_path": FOLDER}}

Answers of /v1/completions have `kv_transfer_params.hidden_states_path`: a file with `hidden_states` [tokens, layers, H]
and `token_ids` [tokens]. While it is written its writer holds an exclusive flock of the file beside it whose name ends
in `.lock`; it is read under a shared one, then both are deleted. The layer whose id is the number of layers is the last
one's output before the final norm, which is applied here, as is the head: both are read from the files of
`teacher.model`, the layers between are not. A document is a request, since an answer names one file.

On the first batch the server's `prompt_logprobs` of 64 tokens are compared with those that follow here. Source:
vLLM's documentation, "Hidden State Extraction"; tests run it against vLLM 0.32.0 on CPUs.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from distill.core.errors import TeacherUnavailableError
from distill.core.files import try_lock
from distill.models.head import HeadWeights, LogitTransform, decoder_of, find_head, probe_logits, read_head
from distill.models.load.fingerprint import fingerprint
from distill.models.load.source import loading, resolve_model_source
from distill.models.loading import load_config
from distill.models.prune.pruning import cut_config
from distill.recipe import TeacherConfig
from distill.teachers.backends.served.client import Servers
from distill.teachers.backends.served.protocol import TargetRequest, documents
from distill.teachers.backends.served.teacher_client import TargetSpec, TargetTensors, TeacherClient, WireRequest
from distill.teachers.backends.served.vllm import COMPLETIONS, DeathWatch, VllmLogprobs

POLL_SECONDS = 0.002
MOST_OFF = 0.1  # nats a token: half precision moves them by a tenth of that


class Ends(NamedTuple):
    """Modules of a model after its layers: final norm and head.

    Attributes:
        head: LM-head weights; `transform`: scale and soft cap of the logits.
        fingerprint: Fingerprint of embedding, norm and head.
    """

    norm: nn.Module
    head: HeadWeights
    transform: LogitTransform
    fingerprint: str


def load_ends(section: TeacherConfig, dtype: torch.dtype) -> Ends:
    """Read a model without its layers, in host memory.

    Raises:
        ValueError: it cannot be read, or has no final norm that can be identified.
    """
    assert section.model is not None
    source = resolve_model_source(section.model, "teacher.model")
    config = load_config(section, "teacher")
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # it would warn of the layers, which are left out
    try:
        with loading(section.model, source, "teacher.model"):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source.location,
                # without layers: embedding, final norm and head are all that is read
                config=cut_config(config, range(0)),
                revision=section.revision,
                dtype=dtype,
                trust_remote_code=section.trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
            )
            model = loaded[0]
            missing = loaded[1]["missing_keys"]
            if missing:
                raise ValueError(f"its files lack {', '.join(sorted(missing))}")
    finally:
        transformers.logging.set_verbosity(before)
    model.eval().requires_grad_(False)
    width = find_head(model).linear.weight.shape[1]  # type: ignore[index]
    # the final norm goes by many names: it is the decoder's one child whose parameters are all vectors of this width
    norms = [
        module
        for module in decoder_of(model).children()
        if (own := list(module.parameters())) and all(weight.shape == (width,) for weight in own)
    ]
    if len(norms) != 1:
        raise ValueError(f"teacher.folder: expected one norm after the layers of {section.model}, found {len(norms)}")
    return Ends(norms[0], read_head(find_head(model)), probe_logits(model, "teacher"), fingerprint(model))


def _one_document_each(query: TargetRequest, beyond: int) -> list[TargetRequest]:
    """Return a query for each document: the connector writes a file for each request, and an answer names one."""
    return [
        TargetRequest(piece.ids[None].astype(np.int32), None, piece.query.astype(np.int32))
        for piece in documents(query, 0, beyond)
    ]


class VllmHiddenStates(VllmLogprobs):
    """vLLM's completions endpoint and the folder that its connector writes to.

    Args:
        servers: Servers of one and the same model, whose death ends the wait for a file.
        spec: Requested outputs: hidden states.
        folder: Path of the shared folder here; only the file names of the paths that a server reports are used.
        ends: Final norm and head of the model, which are computed here.
    """

    def __init__(self, servers: Servers, spec: TargetSpec, folder: Path, ends: Ends) -> None:
        super().__init__(spec._replace(top_k=1))
        self.spec = spec._replace(deterministic=False)
        self.servers = servers
        self.folder = folder
        self.ends = ends
        self.read_bytes = 0
        if not folder.is_dir():
            raise ValueError(f"teacher.folder: expected the folder that vLLM's connector writes to, got {folder}")

    def question(self, query: TargetRequest) -> bytes:
        question: dict[str, Any] = json.loads(super().question(query))
        del question["prompt_logprobs"]
        return json.dumps(question).encode()

    def requests(self, query: TargetRequest) -> Sequence[WireRequest]:
        return [WireRequest(COMPLETIONS, self.question(one), one) for one in _one_document_each(query, 0)]

    def read(self, body: torch.Tensor, query: TargetRequest) -> TargetTensors:
        """Return the hidden states of one document, and delete the file that had them."""
        return {"hidden": self._hidden(body, query.ids[0])[torch.from_numpy(query.rows)]}

    @torch.no_grad()
    def _hidden(self, body: torch.Tensor, ids: np.ndarray) -> torch.Tensor:
        """Return hidden states [tokens, H] of a document, after the final norm, from the file that an answer names."""
        found = self.load(self.file_of(body))
        states = found.get("hidden_states")
        tokens = found.get("token_ids")
        if states is None or tokens is None or states.dim() != 3 or states.shape[2] != self.spec.hidden:
            got = None if states is None else tuple(states.shape)
            width = self.spec.hidden
            raise TeacherUnavailableError(
                f"teacher.folder: hidden_states: expected [tokens, layers, {width}], got {got}"
            )
        if len(states) < len(ids) or tokens[: len(ids)].tolist() != ids.tolist():
            raise TeacherUnavailableError("teacher.folder: a file of other tokens than requested")
        # the output of the last recorded layer; the file may have rows after the document
        return self.ends.norm(states[: len(ids), -1].to(self.spec.dtype))

    def file_of(self, body: torch.Tensor) -> Path:
        """Return the path of the file that an answer names, on this machine."""
        try:
            answer = json.loads(body.numpy().tobytes())
            return self.folder / Path(answer["kv_transfer_params"]["hidden_states_path"]).name
        except (ValueError, KeyError, TypeError, RecursionError):
            raise TeacherUnavailableError(
                "teacher.folder: a response without kv_transfer_params.hidden_states_path: start vLLM with the method "
                "extract_hidden_states and its ExampleHiddenStatesConnector"
            ) from None

    def load(self, path: Path) -> dict[str, torch.Tensor]:
        """Return the tensors of a file once it is written, and delete it.

        Raises:
            TeacherUnavailableError: it does not come, or a server has died meanwhile.
        """
        lock = path.with_name(path.name + ".lock")
        until = time.monotonic() + self.servers.config.wait
        fault_of_servers = DeathWatch(self.servers, of_all=False)
        while True:
            try:
                with _shared(lock):
                    found = load_file(path)
                    break
            except (OSError, SafetensorError) as error:  # held by its writer; not there yet; without lock, in parts
                if time.monotonic() > until:
                    raise TeacherUnavailableError(f"teacher.folder: {path} cannot be read: {error!s:.200}") from None
                fault = fault_of_servers()
                if fault is not None:
                    raise TeacherUnavailableError(f"{fault}, and {path} was not written") from None
                time.sleep(POLL_SECONDS)
        self.read_bytes += path.stat().st_size
        for file in (path, lock):
            file.unlink(missing_ok=True)
        return found

    def file_bytes(self) -> int:
        return self.read_bytes

    def parity(self, client: TeacherClient, query: TargetRequest) -> str:
        """Compare the server's own log-probabilities of the next tokens with those computed from its hidden states.

        Raises:
            ValueError: they differ: layers, norm, head or soft cap are not the server's.
        """
        # the same documents twice: the server's own log-probabilities, and its states, through norm and head here
        own_logprobs = TeacherClient(client.servers, _LogprobsWithFiles(self))
        try:
            expected = own_logprobs.ask(query).result()["label_logprob"].double()
        except TeacherUnavailableError as refused:
            return f"its log-probabilities are not compared: {refused}"
        weight, bias, _ = self.ends.head
        hidden = client.ask(query).result()["hidden"]
        z = nn.functional.linear(hidden.to(weight), weight, bias).double() * self.ends.transform.scale
        cap = self.ends.transform.softcap
        z = z if cap is None else cap * torch.tanh(z / cap)
        own = z.log_softmax(-1).gather(1, torch.from_numpy(query.labels.astype(np.int64))[:, None])[:, 0]
        off = (own - expected).abs().mean().item()
        if not off <= MOST_OFF:
            raise ValueError(
                f"teacher.folder: log-probabilities made here are off by {off:.2g} nats a token from the server's own: "
                "its last layer id is not the number of layers, or teacher.model is another model than it serves"
            )
        return f"log-probabilities of {len(own)} tokens are the server's own, to {off:.1g} nats"


class _LogprobsWithFiles(VllmLogprobs):
    """The log-probabilities of a server whose connector writes a file for each request, which is deleted."""

    def __init__(self, states: VllmHiddenStates) -> None:
        super().__init__(states.spec._replace(top_k=1))
        self.model = states.model
        self.states = states

    def requests(self, query: TargetRequest) -> Sequence[WireRequest]:
        return [WireRequest(COMPLETIONS, self.question(one), one) for one in _one_document_each(query, 1)]

    def read(self, body: torch.Tensor, query: TargetRequest) -> TargetTensors:
        self.states.load(self.states.file_of(body))
        return super().read(body, query)


@contextlib.contextmanager
def _shared(lock: Path) -> Iterator[None]:
    """Hold a shared flock, where there is a file to lock; OSError while its writer holds it."""
    if not lock.exists():
        yield
        return
    with lock.open() as file:
        if try_lock(file.fileno(), shared=True) is False:
            raise BlockingIOError(f"{lock} is held by its writer")
        yield
