"""Rollouts by vLLM beside our decode loop: the program that test_engine_vllm.py runs in vLLM's environment.

python engine_rollouts.py answers MODEL_FOLDER      # greedy answers of both, the weights changed in between
python engine_rollouts.py run RECIPE                # a whole run; its folder
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill.generation.decode_loop import EngineSettings
from distill.generation.engines import engine_for

QUESTIONS = ("What is the capital of France?", "Write a short poem about the sea.", "Count to ten.", "Why is it blue?")
MOST = 64


def answers(folder: str) -> list[dict[str, object]]:
    """Greedy answers of a model as it is and after its embedding's rows were shuffled and a layer changed."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in QUESTIONS
    ]
    ends = [tokenizer.eos_token_id]
    settings = EngineSettings(tokenizer.pad_token_id, ends, max_length=max(map(len, prompts)) + MOST, log_probs=True)
    made, own = (engine_for(name, model, settings, tokenizer=tokenizer, trains=True) for name in ("vllm", "distill"))
    found = []
    for _ in range(2):
        theirs, ours = (engine.generate(prompts, max_new_tokens=MOST) for engine in (made, own))
        pairs = [zip(*both, strict=False) for both in zip(theirs.log_probs, ours.log_probs, strict=True)]
        gap = max(abs(a - b) for each in pairs for a, b in each)
        found.append({"vllm": theirs.tokens, "own": ours.tokens, "gap": gap})
        with torch.no_grad():
            weight = model.get_input_embeddings().weight
            weight.copy_(weight[torch.randperm(len(weight), generator=torch.Generator().manual_seed(0))])
            model.model.layers[0].mlp.up_proj.weight.mul_(1.1)
    return found


def run(path: str) -> dict[str, object]:
    """A run of a recipe, as `distill run` makes it."""
    from distill.recipe import load
    from distill.run import run as whole

    result = whole(load(path), name="vllm")
    return {"folder": str(result.folder), "before": result.before.forward_kl, "after": result.after.forward_kl}


if __name__ == "__main__":
    made = {"answers": answers, "run": run}[sys.argv[1]](sys.argv[2])
    Path(sys.argv[3]).write_text(json.dumps(made))
