"""Name, unit and key of a run's divergence, in printed reports and in the files that a run writes.

Figures against a teacher that is loaded and shares the tokenizer are Kullback-Leibler divergences over the vocabulary,
means over tokens. A cache of K tokens has fewer outcomes, and two tokenizers are compared over spans of text, partly
by sorted probabilities (ULD, Boizard et al., 2024, arXiv 2402.12030), which is no KL. A run keeps its measure in
`before.json` and `result.json`, where reports and comparisons read it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# keys of `HeldOut` in a run's files, where its divergences are no KL over tokens
OTHER_KEYS = {"forward_kl": "forward_divergence", "reverse_kl": "reverse_divergence", "tokens": "spans"}
SAMPLED = "estimated KL"  # of a teacher's sampled tokens


class DivergenceUnit(NamedTuple):
    """Name, unit and key of a divergence.

    Attributes:
        name: Name as in "forward {name}" or "{name} to teacher".
        unit: Unit that the metrics are means over, in the singular.
        key: Key of the metric in `metrics.jsonl`, `kl` or `divergence`.
    """

    name: str = "KL"
    unit: str = "token"
    key: str = "kl"

    @property
    def at_loss_temperature(self) -> bool:
        """Return whether training reports it at the loss's temperatures, as every divergence over K tokens.

        A KL over whole vocabularies is reported at 1. The name tells them apart, and is what files of runs hold.
        """
        return self.key == "kl" and self.name != "KL"

    @property
    def is_estimated(self) -> bool:
        """Return whether sampled tokens estimate it, above which their loss is by a constant (`top_k_encoding`)."""
        return SAMPLED in self.name

    @property
    def unit_label(self) -> str:
        """Return the unit of a metric in nats, with its article."""
        return f"nats {'an' if self.unit[0] in 'aeiou' else 'a'} {self.unit}"

    def display_name(self, key: str) -> str:
        """Return the name of a training metric `kl` or `divergence`; the latter may be another, such as the JSD."""
        return self.name.replace("KL", "kl") if key == self.key else key

    def to_json(self, held_out: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metrics of a `HeldOut` by their keys in a file."""
        keys = {} if self.key == "kl" else OTHER_KEYS
        return {keys.get(name, name): value for name, value in held_out.items()}

    def read(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metrics of a file by the names of `HeldOut`; older files have these names already."""
        names = {key: name for name, key in OTHER_KEYS.items()}
        return {names.get(key, key): value for key, value in figures.items()}


KL = DivergenceUnit()
SPANS = DivergenceUnit("span divergence", "aligned span", "divergence")


def combine_measures(measures: Sequence[DivergenceUnit]) -> DivergenceUnit:
    """Return the measure of the divergences of several routes, each of its own kind."""
    names = dict.fromkeys(each.name for each in measures)
    units = dict.fromkeys(each.unit for each in measures)
    key = KL.key if all(each.key == KL.key for each in measures) else SPANS.key
    return DivergenceUnit(" / ".join(names), "place" if len(units) > 1 else "".join(units), key)


def cache_measure(manifest: Mapping[str, Any]) -> DivergenceUnit:
    if manifest.get("kind") == "hidden":
        return KL
    k = manifest["k"]
    temperature = float(manifest["temperature"])
    name = {"bucket": f"KL over {k + 1} outcomes", "renormalize": f"KL over {k} tokens", "sampled": SAMPLED}
    return DivergenceUnit(name[manifest["tail"]] + ("" if temperature == 1 else f" at T = {temperature:g}"))


def metric_text(value: float) -> str:
    """Return a metric as text; "unknown" for NaN, such as the reverse KL of sampled tokens."""
    return "unknown" if math.isnan(value) else f"{value:.4f}"


def perplexity(cross_entropy: float) -> float:
    """Return exp of a mean cross-entropy in nats; infinite where that overflows."""
    return math.inf if cross_entropy >= 700 else math.exp(cross_entropy)
