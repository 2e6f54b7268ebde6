"""The layers of gpt-oss-20b, patched and packed, beside transformers' eager attention, the only one it has for sinks.

Two layers, one of them with a sliding window, forward and backward through the body (no head). transformers does not
keep the documents of a packed row apart in this model, so that eager is given them alone, one after the other, or as
a padded batch. The gate: errors against fp32 at most 1.5 times those of eager with each document alone, in norm and of
the worst token, with four experts that every token is sent to: of more, rounding decides which a token gets.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GptOssConfig

from distill.models.patch.patching import patch
from scripts.bench.harness import Row, peak_above_inputs, time_in_turn

SHAPES = {"one document": [4096], "4 documents": [1500, 300, 900, 1396]}
SLACK, FLOOR = 1.5, 2e-3
ALONE, PADDED, OURS = "eager, each document alone", "eager, padded", "ours, packed"
Body = Callable[[], torch.Tensor]


def make(device: str, dtype: torch.dtype, **more: Any) -> Any:
    """Two layers with the sizes of gpt-oss-20b; `more` changes them."""
    settings: dict[str, Any] = {"num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 1024}
    config = GptOssConfig(
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        pad_token_id=0,
        attn_implementation="eager",
        **settings | more,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def pair(device: str, dtype: torch.dtype, **more: Any) -> tuple[Any, Any]:
    """The model by plain transformers, and the same patched."""
    plain = make(device, dtype, **more)
    patched = copy.deepcopy(plain)
    report = patch(patched, log_it=False)
    assert report.attention == "triton", report
    return plain, patched


def bodies(plain: Any, patched: Any, documents: Sequence[torch.Tensor]) -> dict[str, Body]:
    """Last hidden states [tokens, H] of all documents, one after the other, by each candidate."""
    lengths = [len(each) for each in documents]
    device, longest = documents[0].device, max(lengths)
    row = torch.cat(list(documents))[None]
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    ids = torch.stack([torch.nn.functional.pad(each, (0, longest - len(each))) for each in documents])
    kept = torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[:, None]

    def hidden(model: Any, **inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model.model(use_cache=False, **inputs).last_hidden_state
        return out

    found = {
        ALONE: lambda: torch.cat([hidden(plain, input_ids=each[None])[0] for each in documents]),
        OURS: lambda: hidden(patched, input_ids=row, position_ids=positions)[0],
    }
    if len(documents) > 1:
        found[PADDED] = lambda: hidden(plain, input_ids=ids, attention_mask=kept.long())[kept]
    return found


def values(model: Any, body: Body, upstream: torch.Tensor) -> dict[str, torch.Tensor]:
    """The hidden states, and gradients of each attention module's parameters, sinks among them."""
    model.zero_grad()
    out = body()
    out.backward(upstream.to(out.dtype))
    learned = {name: p.grad for name, p in model.named_parameters() if "self_attn" in name and p.grad is not None}
    made = {"hidden": out.detach().clone(), **{name: grad.clone() for name, grad in learned.items()}}
    model.zero_grad()
    return made


def error(given: torch.Tensor, right: torch.Tensor) -> float:
    """Relative, in norm."""
    return float((given.double() - right.double()).norm() / right.double().norm())


def worst(given: torch.Tensor, right: torch.Tensor) -> float:
    """The largest error of a token, relative to the mean token."""
    rows = (given.double() - right.double()).norm(dim=-1)
    return float(rows.max() / right.double().norm(dim=-1).mean())


def errors(plain: Any, patched: Any, documents: Sequence[torch.Tensor]) -> dict[str, dict[str, float]]:
    """Return each candidate's errors against fp32: hidden states, worst token, worst gradient, gradient of sinks."""
    upstream = torch.randn(sum(map(len, documents)), plain.config.hidden_size, device=documents[0].device)
    wide = copy.deepcopy(plain).float()
    right = values(wide, bodies(wide, wide, documents)[ALONE], upstream)
    del wide
    found = {}
    for name, body in bodies(plain, patched, documents).items():
        made = values(patched if name == OURS else plain, body, upstream)
        assert made.keys() == right.keys()
        each = {key: error(value, right[key]) for key, value in made.items()}
        sinks = max(value for key, value in each.items() if key.endswith("sinks"))
        rest = max(value for key, value in each.items() if key != "hidden")
        found[name] = {
            "hidden": each["hidden"],
            "worst": worst(made["hidden"], right["hidden"]),
            "d": rest,
            "dsinks": sinks,
        }
    return found


def passes(given: dict[str, float], eager: dict[str, float]) -> bool:
    """Return whether no error exceeds eager's times the slack."""
    return all(value <= SLACK * eager[key] + FLOOR for key, value in given.items())


def draw(lengths: Sequence[int], vocab: int, device: str) -> list[torch.Tensor]:
    """Return random documents of these lengths, from a fixed seed."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab, (length,), generator=generator).to(device) for length in lengths]


def run(quick: bool, only: str) -> Iterator[Row]:
    """Measure the shapes whose name contains `only`, plain and patched."""
    few = pair("cuda", torch.bfloat16, num_local_experts=4)
    plain, patched = pair("cuda", torch.bfloat16)
    for name, lengths in SHAPES.items():
        if only not in name:
            continue
        documents = draw(lengths, plain.config.vocab_size, "cuda")
        shape = f"two layers of gpt-oss-20b, bf16, {name}, {sum(lengths)} tokens"
        found = errors(*few, documents)
        upstream = torch.randn(sum(lengths), plain.config.hidden_size, device="cuda", dtype=torch.bfloat16)
        forward, both = {}, {}
        for candidate, body in bodies(plain, patched, documents).items():
            if not passes(found[candidate], found[ALONE]):
                yield Row("gpt_oss", shape, candidate, math.nan, error=found[candidate], note="wrong, not timed")
                continue
            forward[candidate] = torch.no_grad()(body)
            both[candidate] = lambda body=body, upstream=upstream: body().backward(upstream)
        for part, runs in (("forward", forward), ("forward + backward", both)):
            for candidate, ms in time_in_turn(runs, rounds=3 if quick else 7).items():
                yield Row(
                    "gpt_oss",
                    f"{shape}, {part}",
                    candidate,
                    ms,
                    peak_mib=peak_above_inputs(runs[candidate]),
                    error=found[candidate],
                    tokens_per_s=sum(lengths) / ms * 1e3,
                )
