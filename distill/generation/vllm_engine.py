"""vLLM as the generation engine, in this process, with a check that it holds the student's weights.

A student that trains is written to a folder before each call and read by vLLM's `reload_weights`. The output head is
written separately from the embedding even where the two are tied: vLLM gives a tied model no head of its own to reload,
and keeps using the initial one (seen with vLLM 0.32: rollouts of new layers under an old head).

After each weight transfer the engine's log-probabilities of a response are compared with the student's own. Differences
within rounding error are accepted; larger ones end the run, since rollouts and importance weights would be those of
another model.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from distill.core.errors import RunError
from distill.core.eval_mode import eval_mode
from distill.core.files import write_json
from distill.core.tensor_files import write_tensors
from distill.generation.decode_loop import DecodeEngine, EngineSettings, Generated, Request
from distill.generation.stopping import truncate_at_end
from distill.models.adapters import merged
from distill.models.head import find_head, unwrap_peft
from distill.models.loading import save_student

log = logging.getLogger(__name__)

HEAD = "model-head.safetensors"
REST = "model-rest.safetensors"
# mean |difference| of log-probabilities, nats per token, that rounding explains. In bfloat16 it was 0.02 to 0.04 for
# SmolLM2, where a stale head gave 28.7; kernels that sum in another order move float32 ones by up to 1e-4.
ROUNDING_UNITS = 32
MIN_TOLERANCE = 1e-3


class VllmEngine(DecodeEngine):
    """vLLM in this process, on the same device as the student, computing in the student's dtype.

    Args:
        model: The student, with or without adapters; on its device.
        tokenizer: Written with the weights; None for models that are only given token ids.
        trains: The weights change between calls and are transferred before each, unless it has `same_weights`.

    Raises:
        RunError: from `run`, when vLLM's log-probabilities are not the student's.
    """

    MEMORY = 0.3  # fraction of the GPU's memory for vLLM's weights and cache

    def __init__(self, model: nn.Module, tokenizer: Any, settings: EngineSettings, trains: bool) -> None:
        from vllm import LLM

        self.model = model
        self.tokenizer = tokenizer
        self.ends = sorted(set(settings.ends))
        self.trains = trains
        columns = settings.vocab_size
        rows = len(find_head(model).linear.weight)  # type: ignore[arg-type]
        self.allowed = list(range(columns)) if columns is not None and columns < rows else None
        self.log_probs = settings.log_probs
        self.stop = settings.stop
        self.autocast = settings.autocast
        self.dtype = settings.autocast or next(model.parameters()).dtype
        memory = Path("/dev/shm")
        place = str(memory) if trains and os.access(memory, os.W_OK) else None
        self._folder = tempfile.TemporaryDirectory(prefix="distill-vllm-", dir=place)
        self.path = Path(self._folder.name) / "model"
        save_untied(model, tokenizer, self.path)
        self._is_new = True
        self.llm: Any = LLM(
            model=str(self.path),
            dtype=str(self.dtype).removeprefix("torch."),
            gpu_memory_utilization=self.MEMORY,
            max_model_len=settings.max_length + 1,  # vLLM requires room for a token after the last one
            logprobs_mode="raw_logprobs",
            enforce_eager=next(model.parameters()).device.type
            == "cpu",  # compiling takes minutes and gives nothing there
        )

    def run(self, request: Request) -> Generated:
        """Generate as `DecodeEngine.run` does; vLLM forms its own batches, and applies `min_p` before other cut-offs.

        Log-probabilities are over all rows of the head, even where only the first `vocab_size` may be sampled.
        """
        from vllm import SamplingParams

        if self.trains and not (self._is_new or request.same_weights):
            save_untied(self.model, self.tokenizer, self.path)
            self.llm.collective_rpc("reload_weights")
            self.llm.reset_prefix_cache()
            self._is_new = True
        drawn = request.sampling._asdict() | {"top_k": request.sampling.top_k or -1}
        with_log_probs = self.log_probs or self._is_new
        settings = [
            SamplingParams(
                **drawn,
                max_tokens=limit,
                seed=seed % 2**63,
                stop_token_ids=self.ends,
                allowed_token_ids=self.allowed,
                logprobs=0 if with_log_probs else None,
                stop=self.stop and list(self.stop.strings),
                detokenize=self.stop is not None,
                skip_special_tokens=False,
            )
            for limit, seed in zip(request.limits, request.seeds, strict=True)
        ]
        requests = [{"prompt_token_ids": list(prompt)} for prompt in request.prompts]
        outputs = [output.outputs[0] for output in self.llm.generate(requests, settings, use_tqdm=False)]
        limits = zip(outputs, request.limits, strict=True)
        responses = [truncate_at_end(output.token_ids, limit, self.ends, self.stop) for output, limit in limits]
        tokens = [own for own, _ in responses]
        log_probs = [
            [each[token].logprob for token, each in zip(own, output.logprobs, strict=False)]
            for own, output in zip(tokens, outputs, strict=True)
            if with_log_probs
        ]
        if self._is_new and tokens:
            longest = max(range(len(tokens)), key=lambda number: len(tokens[number]))
            self._require_same_model(request.prompts[longest], tokens[longest], log_probs[longest])
            self._is_new = False
        return Generated(tokens, [cut for _, cut in responses], log_probs if self.log_probs else [])

    def _require_same_model(self, prompt: Sequence[int], tokens: Sequence[int], given: Sequence[float]) -> None:
        """Compare vLLM's log-probabilities of one response with the student's.

        Raises:
            RunError: they differ by more than rounding explains.
        """
        own = response_log_probs(self.model, prompt, tokens, self.autocast)
        gap = float((torch.tensor(given, dtype=torch.float64) - own).abs().mean())
        most = max(MIN_TOLERANCE, ROUNDING_UNITS * torch.finfo(self.dtype).eps)
        log.debug("vLLM's log-probabilities of %d tokens differ from the student's by %.1e on average", len(own), gap)
        if not gap <= most:
            raise RunError(
                f"data.on_policy.engine: expected vLLM to compute the student's own log-probabilities up to rounding "
                f"(mean difference at most {most:.1e} nats a token in {str(self.dtype).removeprefix('torch.')}), got "
                f"{gap:.1e} over {len(own)} tokens: it does not hold the student's weights, or computes this model "
                "otherwise; use engine: distill"
            )


@torch.no_grad()
def response_log_probs(
    model: nn.Module, prompt: Sequence[int], tokens: Sequence[int], autocast: torch.dtype | None = None
) -> torch.Tensor:
    """Return each response token's log-probability under `model` at temperature 1: float64 [tokens], on the CPU.

    Args:
        model: A causal language model, on its device.
        prompt: Token ids before the response, at least one.
        autocast: Compute dtype where that is not the weights'.
    """
    inner: Any = unwrap_peft(model)
    device = next(model.parameters()).device
    ids = torch.tensor([[*prompt, *tokens]], device=device)
    with eval_mode(model), torch.autocast(device.type, autocast, enabled=autocast is not None):
        logits = type(inner).forward(inner, input_ids=ids, use_cache=False).logits
    scores = logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
    return scores.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()


def save_untied(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write a student as `save_student` does, with a separate head even where head and embedding are tied.

    Args:
        model: The student; adapters are merged into a copy.
        tokenizer: Written to the same folder; None for none.
        folder: Folder, which is replaced.
    """
    plain: Any = merged(model) if hasattr(model, "peft_config") else unwrap_peft(model)
    save_student(plain, tokenizer, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sections = [section for section in (config, config.get("text_config")) if section]
    if not any(section.get("tie_word_embeddings") for section in sections):
        return
    head = plain.get_output_embeddings()
    name = next(name for name, module in plain.named_modules() if module is head) + ".weight"
    write_tensors(folder / HEAD, {name: head.weight})
    whole = folder / SAFE_WEIGHTS_NAME
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if whole.is_file():  # a sharded checkpoint has an index instead
        with safe_open(str(whole), framework="pt") as file:
            shards = {"metadata": {}, "weight_map": dict.fromkeys(file.keys(), REST)}
        whole.rename(folder / REST)
    else:
        shards = json.loads(index.read_text(encoding="utf-8"))
    shards["weight_map"][name] = HEAD
    write_json(index, shards)
    for section in sections:
        section["tie_word_embeddings"] = False
    write_json(folder / "config.json", config)
