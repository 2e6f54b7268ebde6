"""Acceptance of a student's tokens as drafts of its teacher in speculative decoding, measured and predicted.

A draft of p_s is accepted with probability sum min(p_s, p_t) = 1 - TVD (Leviathan et al., 2023, arXiv 2211.17192).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from distill.evaluation.bootstrap import Interval, mean_intervals


@torch.no_grad()
def measure_acceptance(
    student: PreTrainedModel, teacher: PreTrainedModel, prompts: Sequence[Sequence[int]], *, count: int, seed: int = 0
) -> dict[str, Interval]:
    """Sample responses of the teacher by transformers' assisted generation, with one draft of the student a step.

    Args:
        student, teacher: Causal language models over one vocabulary, on one device.
        prompts: Token ids; intervals are by resampling prompts.
        seed: Seed of the sampling, at temperature 1.

    Returns:
        `drafts_accepted`, the share of drafts; `drafts_predicted`, 1 - TVD over the same responses; and
        `tokens_per_forward` of the teacher.
    """
    draft: Any = student.generation_config  # of which assisted generation takes the number of drafts
    # one draft a step, never more or fewer: forward passes of the student then count drafts
    draft.num_assistant_tokens = 1
    draft.num_assistant_tokens_schedule = "constant"
    draft.assistant_confidence_threshold = 0.0
    calls: dict[str, int] = {}
    models = {"student": student, "teacher": teacher}
    hooks = [model.register_forward_pre_hook(functools.partial(_count, calls, name)) for name, model in models.items()]
    sample = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "eos_token_id": None}
    torch.manual_seed(seed)
    found = []
    try:
        for prompt in prompts:
            ids = torch.tensor([list(prompt)], device=teacher.device)
            calls |= dict.fromkeys(models, 0)
            whole: Any = teacher.generate(  # type: ignore[operator]
                ids, attention_mask=torch.ones_like(ids), assistant_model=student, max_new_tokens=count, **sample
            )
            made = whole.shape[1] - len(prompt)
            steps = calls["teacher"]
            drafts = calls["student"]
            both = [model(input_ids=whole[:, :-1]).logits[0, len(prompt) - 1 :].float() for model in models.values()]
            columns = min(logits.shape[-1] for logits in both)
            p_s, p_t = (logits[:, :columns].softmax(-1) for logits in both)
            # each forward pass of the teacher gives one token of its own; what was made beyond are accepted drafts
            found.append([made - steps, drafts, float(torch.minimum(p_s, p_t).sum()), made, steps])
    finally:
        for hook in hooks:
            hook.remove()
    accepted, drafts, alike, made, steps = np.array(found, dtype=np.float64).T
    pairs = {
        "drafts_accepted": (accepted, drafts),
        "drafts_predicted": (alike, made),
        "tokens_per_forward": (made, steps),
    }
    return {name: mean_intervals(sums[:, None], counts)[0] for name, (sums, counts) in pairs.items()}


def _count(calls: dict[str, int], name: str, *_: object) -> None:
    calls[name] += 1
