"""Corrections that a model of transformers needs for its forward to be right in training, whoever calls it.

Whatever takes a model applies them: loading, `distill.patch`, the objective. Applying them again changes nothing.
"""

from __future__ import annotations

from torch import nn

from distill.models.patch.attention import keep_soft_cap
from distill.models.patch.document_rope import rope_by_document


def correct_forward(
    model: nn.Module, attention: str = "auto", field: str = "attn_implementation", *, survives_unpatch: bool = True
) -> None:
    """Keep the soft cap of a model's attention scores, and rotate each document as it is alone.

    Args:
        model: A model of transformers, bare or inside PEFT.
        attention: The attention implementation that somebody asked for, or "auto".
        field: The setting that an error names.
        survives_unpatch: False where `unpatch` has to give back transformers' own rotary embeddings.

    Raises:
        ValueError: `attention` drops the soft cap.
    """
    keep_soft_cap(model, attention, field)
    rope_by_document(model, survives_unpatch=survives_unpatch)
