"""Packed folders read by others: the program that test_engine_packed.py runs in vLLM's environment.

python engine_packed.py transformers|vllm IDS OUTPUT FOLDER...     # log-probabilities of the next token, by folder

Where vLLM refuses a folder, its message takes their place; where its CPU build lacks the kernel for 4 bits, `MISSING`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

INT4_OP = "cpu_gemm_wna16"
MISSING = f"vLLM's CPU build of this machine has no torch.ops._C.{INT4_OP}, which needs AVX-512"


def by_transformers(folder: str, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [S, V] from the weights as the package compressed-tensors decodes them, in float32."""
    from transformers import AutoModelForCausalLM

    # nvfp4 is decoded into bfloat16, which holds its values exactly
    dtype = torch.bfloat16 if "nvfp4" in folder else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        model(input_ids=ids[None])  # decodes
        for tensor in model.parameters():
            tensor.data = tensor.data.float() if tensor.is_floating_point() else tensor.data
        return model(input_ids=ids[None]).logits[0].log_softmax(-1)


def packed_in_int4(folder: Path) -> bool:
    """Return whether vLLM multiplies by the 4-bit codes of this folder; a folder that a run saves holds 16 bits."""
    return "quantization_config" in (folder / "config.json").read_text() and "int4" in folder.name


def by_vllm(folder: str, ids: torch.Tensor) -> torch.Tensor | str:
    """Log-probabilities [S, V] as vLLM computes in float16, the dtype of its kernels for 4 bits on CPUs."""
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    # vLLM loads such a folder without the op, and stops at the first multiplication
    if packed_in_int4(Path(folder)) and not hasattr(torch.ops._C, INT4_OP):
        return MISSING
    settings = {"enforce_eager": True, "max_model_len": 128, "max_logprobs": 320, "max_num_seqs": 4}
    try:
        engine = LLM(folder, dtype="float16", **settings)
    except ValueError as error:
        return str(error)
    settings = SamplingParams(max_tokens=1, logprobs=320, prompt_logprobs=320)
    (output,) = engine.generate([{"prompt_token_ids": ids.tolist()}], settings, use_tqdm=False)
    found = torch.full((len(ids), 320), -torch.inf)
    for row, top in enumerate([*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]):
        for token, value in top.items():
            found[row, int(token)] = value.logprob
    return found


if __name__ == "__main__":
    _, reader, given, output, *folders = sys.argv
    ids = torch.load(given)
    read = {"transformers": by_transformers, "vllm": by_vllm}[reader]
    torch.save({Path(folder).name: read(folder, ids) for folder in folders}, output)
