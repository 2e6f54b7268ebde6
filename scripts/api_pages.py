"""The Python API pages under docs/reference/api, and the table of docs/reference/kernels.md, from the public names."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, NamedTuple

import distill
from scripts.readme import HEADLINES, UNITS, Headline, cell, compared


class Entry(NamedTuple):
    """A public name.

    Attributes:
        name: as it is imported.
        replaces: what one would use without it.
        measured: rows that compare the two; None where it is measured as a part of another's.
    """

    name: str
    replaces: str
    measured: Headline | None = None


LOSS = ("linear variants", "8192 x 128256, H 2048 / 4096")
H100 = "NVIDIA H100 80GB HBM3"
_BY_CLAIM = {line.claim: line for line in HEADLINES}


def _layer(case: str, shape: str, *rivals: str) -> Headline:
    return Headline(case, (f"{case} forward + backward", shape), "ours", rivals, "ms")


def _logits(case: str, *rivals: str) -> Headline:
    return Headline(case, (f"logits {case}", "4096 x 128256"), "ours", ("eager", "torch.compile", *rivals), "ms")


NOTE = "<!-- written by python -m scripts.docs -->"
INDEX = """\
# Python API

{note}

Names are imported from `distill`, unless their reference shows a longer path. Losses, layers, attention, linear \
layers and the optimizer are also in `distill_kernels`, which needs only torch and Triton (`pip install ./kernels`).

```python
from distill import DistillationTrainer, FusedKLLoss, patch
from distill_kernels import flash_attention
```

| page | names |
|---|---|
{rows}

How fast each of them is, and what it replaces: [kernels](../kernels.md).
"""
FILES = {
    "Losses over hidden states": "losses.md",
    "Losses over logits": "logit-losses.md",
    "Layers": "layers.md",
    "Attention and decoding": "attention.md",
    "Linear layers": "linear-layers.md",
    "Optimizer": "optimizer.md",
    "Models, recipes and training": "training.md",
}
_SOFTMAXES = ", after bf16 softmaxes"
_BARE = "floor: bare products"
GROUPS: dict[str, tuple[Entry, ...]] = {
    "Losses over hidden states": (
        Entry(
            "FusedKLLoss",
            "projecting both hidden states, `log_softmax`, `kl_div`",
            _BY_CLAIM["fused forward KL, forward and backward, time (H100)"],
        ),
        Entry(
            "FusedJSDLoss",
            "the same with a mixture",
            Headline(
                "",
                ("linear jsd", LOSS[1]),
                "ours",
                (
                    "eager, full logits",
                    "torch.compile, full logits",
                    "Liger LigerFusedLinearJSD",
                    "TRL ChunkedDivergenceFunction",
                ),
                "ms",
            ),
        ),
        Entry("FusedSkewKLLoss", "DistiLLM's skewed KL", Headline("", LOSS, "skewed KL(0.1)", (_BARE,), "ms", H100)),
        Entry(
            "FusedTVDLoss",
            "half the L1 distance of two softmaxes",
            Headline("", LOSS, "total variation", (_BARE,), "ms", H100),
        ),
        Entry(
            "FusedTopKKLLoss",
            "KL from a teacher's stored top-k log-probabilities",
            Headline("", ("linear top-k", LOSS[1]), "ours, K = 64, bucket", ("full fused KL",), "ms"),
        ),
        Entry("FusedCrossEntropyLoss", "`lm_head`, then `F.cross_entropy`"),
        Entry(
            "FusedDistillationLoss",
            "a weighted sum of the above in one pass",
            Headline("", LOSS, "forward KL + cross-entropy", (_BARE,), "ms", H100),
        ),
        Entry(
            "FusedStudentTopKKLLoss", "KL over the student's top-k tokens, from both models' hidden states and heads"
        ),
        Entry("FusedPolicyGradientLoss", "a policy-gradient loss (PPO, GRPO) over log-probabilities of sampled tokens"),
        Entry("fused_kl_loss", "`FusedKLLoss` as a function"),
        Entry("fused_jsd_loss", "`FusedJSDLoss` as a function"),
        Entry("fused_skew_kl_loss", "`FusedSkewKLLoss` as a function"),
        Entry("fused_tvd_loss", "`FusedTVDLoss` as a function"),
        Entry("fused_top_k_kl_loss", "`FusedTopKKLLoss` as a function"),
        Entry("fused_student_top_k_kl_loss", "`FusedStudentTopKKLLoss` as a function"),
        Entry("fused_policy_gradient_loss", "`FusedPolicyGradientLoss` as a function"),
        Entry("fused_cross_entropy_loss", "`FusedCrossEntropyLoss` as a function"),
        Entry("fused_log_probs", "log-probability of each label under a model, without logits"),
        Entry("fused_distillation_loss", "`FusedDistillationLoss` as a function"),
        Entry("ChunkedLoss", "a custom loss over full logits, computed chunk by chunk"),
        Entry("LossTerm", "(one term of a sum: a divergence, its parameter, weight and caps)"),
        Entry("Clip", "(caps on a divergence: of a token's value, of each vocabulary entry's)"),
        Entry("Temperatures", "(a temperature for each model)"),
        Entry("TokenStats", "(statistics per token: KL, entropies, top-1 agreement)"),
        Entry(
            "TeacherHead",
            "averaging several teachers' probabilities",
            Headline("", ("mixture of teachers", LOSS[1]), "two teachers", ("one teacher",), "ms"),
        ),
        Entry("head_loss", "calling a loss on `lm_head.weight`, where FSDP2 shards it"),
        Entry("call_inside", "(runs a function inside a module's forward, so that its hooks run)"),
    ),
    "Losses over logits": (
        Entry("kl_div", "`F.kl_div` of two `log_softmax`", _logits("forward_kl", f"Liger LigerKLDIVLoss{_SOFTMAXES}")),
        Entry("jsd", "two KLs from a mixture", _logits("jsd", f"Liger LigerJSD{_SOFTMAXES}")),
        Entry("skew_kl", "KL from a mixture"),
        Entry("tvd", "half the L1 distance of two softmaxes", _logits("tvd", f"Liger LigerTVDLoss{_SOFTMAXES}")),
        Entry("cross_entropy", "`F.cross_entropy`", _logits("cross_entropy", "Liger LigerCrossEntropyLoss")),
        Entry("distillation_loss", "a weighted sum of the above in one pass"),
        Entry("kl_probabilities", "`F.kl_div` of probabilities"),
    ),
    "Layers": (
        Entry(
            "RMSNorm",
            "`nn.RMSNorm`, transformers' norms",
            _layer("rms_norm", "8192x4096 bfloat16, 64 MiB", "F.rms_norm", "as transformers", "torch.compile", "liger"),
        ),
        Entry("rms_norm", "`F.rms_norm`; `RMSNorm` as a function"),
        Entry(
            "add_rms_norm",
            "the residual addition, then `F.rms_norm`",
            _layer(
                "add_rms_norm",
                "8192x4096 bfloat16, 64 MiB",
                "add, F.rms_norm",
                "as transformers",
                "torch.compile",
                "liger",
            ),
        ),
        Entry(
            "LayerNorm",
            "`nn.LayerNorm`",
            _layer("layer_norm", "8192x4096 bfloat16, 64 MiB", "F.layer_norm", "torch.compile", "liger"),
        ),
        Entry("layer_norm", "`F.layer_norm`; `LayerNorm` as a function"),
        Entry("swiglu", "`F.silu(gate) * up`"),
        Entry("geglu", "`F.gelu(gate) * up`"),
        Entry("glu", "SwiGLU or GeGLU, by the name of the activation"),
        Entry(
            "BiasGELU",
            "`nn.Linear`'s bias, then `nn.GELU`",
            _layer("bias_gelu", "8192x8192 float16, 128 MiB", "eager", "eager, spelled out", "torch.compile"),
        ),
        Entry("bias_gelu", "`F.gelu(x + bias)`; `BiasGELU` as a function"),
        Entry("rope", "`apply_rotary_pos_emb`"),
        Entry(
            "softmax",
            "`torch.softmax`",
            _layer("softmax", "8192x4096 bfloat16, 64 MiB", "torch.softmax", "torch.compile", "liger"),
        ),
    ),
    "Attention and decoding": (
        Entry(
            "flash_attention",
            "`F.scaled_dot_product_attention`; packed documents and grouped heads",
            _BY_CLAIM["attention, forward and backward"],
        ),
        Entry(
            "decode_attention",
            "attention of one token a sequence over its cache",
            Headline("", ("decode", "B=64 H=32/8 T=1024 D=128"), "ours", ("SDPA",), "ms"),
        ),
        Entry("KVCache", "`DynamicCache`, `StaticCache`", _BY_CLAIM["generation with a 1B model, batch of 32"]),
        Entry("cu_seqlens_from_position_ids", "finding the bounds of packed documents on the host"),
        Entry("sample_tokens", "`torch.multinomial` after temperature, top-k and top-p"),
    ),
    "Linear layers": (
        Entry(
            "SplitKLinear",
            "`nn.Linear` for few rows",
            Headline("", ("split_k", "14336x4096, 16 rows"), "split-K", ("cuBLAS",), "ms"),
        ),
        Entry("split_k_linear", "`F.linear` for few rows; `SplitKLinear` as a function"),
        Entry(
            "triton_linear",
            "`F.linear` without cuBLAS",
            _BY_CLAIM["generation with Granite 3.3 8B, Triton kernels only"],
        ),
        Entry(
            "Fp8Linear",
            "`nn.Linear` of a frozen model",
            Headline("", ("fp8", "4096x28672, 8192 tokens"), "fp8 layer", ("bf16 cuBLAS",), "ms"),
        ),
        Entry("fp8_linear", "`Fp8Linear` as a function"),
        Entry("quantize_rows", "scaling each row into fp8's range"),
        Entry("swap_linears_for_fp8", "replacing a model's linear layers one by one"),
        Entry("lora_linear", "`x W + (x A) B` as PEFT computes it, in three GEMMs"),
    ),
    "Optimizer": (Entry("FusedAdamW", "`torch.optim.AdamW(fused=True)`", _BY_CLAIM["AdamW, 1.24 B parameters"]),),
    "Models, recipes and training": (
        Entry(
            "DistillationTrainer",
            "`transformers.Trainer` with a custom loss",
            _BY_CLAIM["training step, 8B to 1B (H100)"],
        ),
        Entry("AutoFusedModelForCausalLM", "`AutoModelForCausalLM`"),
        Entry("patch", "the layers, attention and loss of a loaded model"),
        Entry("unpatch", "(restores the original forwards of a patched model)"),
        Entry("Recipe", "(a validated recipe file, as an object)"),
    ),
}


# names that are used from their own module, shown after the public ones of the page
MORE: dict[str, tuple[str, ...]] = {
    "training.md": (
        "distill.recipe.load",
        "distill.recipe.parse",
        "distill.recipe.dump",
        "distill.run.run",
        "distill.run.RunResult",
    ),
    "attention.md": ("distill.generation.decode_loop.DecodeLoop", "distill.generation.decode_loop.EngineSettings"),
    "losses.md": ("distill.objectives.policy_gradient.policy_gradient_loss",),
}


def pages() -> dict[str, str]:
    """Return the text of each API page by its file name: signatures, then the docstrings as mkdocstrings renders them.

    The signatures are for whoever reads the page in a clone, where a line such as `::: distill.patch` stays as it is.
    """
    rows = "\n".join(f"| [{title}]({file}) | {_names(title, file)} |" for title, file in FILES.items())
    found = {"index.md": INDEX.format(note=NOTE, rows=rows)}
    for title, file in FILES.items():
        targets = [*(_target(entry.name) for entry in GROUPS[title]), *MORE.get(file, ())]
        blocks = [*map(_summary, targets), ""]
        blocks += [f"::: {_target(entry.name)}\n" for entry in GROUPS[title]]
        blocks += [f"::: {target}\n    options:\n      show_root_full_path: true\n" for target in MORE.get(file, ())]
        found[file] = "\n".join([f"# {title}", "", NOTE, "", *blocks])
    return found


def _summary(target: str) -> str:
    """Return a name with its arguments and defaults, and the first sentence of its docstring."""
    module, _, name = target.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    signature = inspect.signature(found)
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    arguments = str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    if hasattr(found, "model_fields"):  # a recipe's section, whose fields have pages of their own
        arguments = "(...)"
    text = inspect.getdoc(found) or ""
    pieces = " ".join(text.partition("\n\n")[0].split()).split("`")
    # outside of code a bracket, as of a shape, would begin a link
    sentence = "`".join(piece if number % 2 else piece.replace("[", r"\[") for number, piece in enumerate(pieces))
    return f"- `{name}{arguments}`: {sentence}"


def table(rows: list[dict[str, Any]]) -> str:
    """Return the tables of docs/reference/kernels.md: what each name replaces, and how much faster it is."""
    lines: list[str] = []
    for title, entries in GROUPS.items():
        lines += [f"## {title}", "", "| name | in place of | measured |", "|---|---|---|"]
        for entry in entries:
            link = f"api/{FILES[title]}#{_target(entry.name)}"
            lines.append(f"| [`{entry.name}`]({link}) | {entry.replaces} | {_figure(entry, rows)} |")
        lines.append("")
    return "\n".join(lines)


def _names(title: str, file: str) -> str:
    """Return links to all names of a page."""
    targets = [_target(entry.name) for entry in GROUPS[title]] + list(MORE.get(file, ()))
    return ", ".join(f"[`{target.rpartition('.')[2]}`]({file}#{target})" for target in targets)


def _target(name: str) -> str:
    """The path by which mkdocstrings finds a name."""
    return f"{'distill' if name in distill.__all__ else 'distill_kernels'}.{name}"


def _figure(entry: Entry, rows: list[dict[str, Any]]) -> str:
    if entry.measured is None:
        return ""
    line = entry.measured
    ours, best, ratio = compared(line, rows)
    unit = UNITS[line.figure]
    where = f"{ours['gpu'].split()[1]}, {ours['case']}, {ours['shape']}, {ours['commit']}"
    if best["candidate"] == _BARE:
        return f"{cell(ours, line.figure)} {unit}, {1 / ratio:.2f} x its GEMMs alone ({where})"
    return (
        f"{cell(ours, line.figure)} {unit}; {best['candidate']} {cell(best, line.figure)} {unit} ({ratio:.2f} x; "
        f"{where})"
    )
