"""What the divergence of a run is: its name wherever a person reads it, and its key in what a run writes.

Figures against a teacher that is loaded and shares the tokenizer are Kullback-Leibler divergences over the vocabulary,
means over tokens. A cache of K tokens knows fewer outcomes, and two tokenizers are compared over spans of text, partly
by sorted probabilities (ULD, Boizard et al., 2024, arXiv 2402.12030), which is no KL. A run keeps its measure in
`before.json` and `result.json`, so that a report or a comparison need not find it out again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

# figures of `HeldOut` as a run writes them, where they are no KL over tokens
OTHER_KEYS = {"forward_kl": "forward_divergence", "reverse_kl": "reverse_divergence", "tokens": "spans"}


class Measure(NamedTuple):
    """What a divergence is.

    Attributes:
        name: what it is called, as in "forward {name}" or "{name} to teacher".
        unit: what the figures are means over, in the singular.
        key: of the figure in `metrics.jsonl`, `kl` or `divergence`.
    """

    name: str = "KL"
    unit: str = "token"
    key: str = "kl"

    @property
    def each(self) -> str:
        """The unit of a figure in nats."""
        return f"nats {'an' if self.unit[0] in 'aeiou' else 'a'} {self.unit}"

    def called(self, key: str) -> str:
        """The name of a training figure `kl` or `divergence`; the latter may be another one, such as the JSD."""
        return self.name.replace("KL", "kl") if key == self.key else key

    def written(self, held_out: Mapping[str, Any]) -> dict[str, Any]:
        """Figures of a `HeldOut` by the keys they have in a file."""
        keys = {} if self.key == "kl" else OTHER_KEYS
        return {keys.get(name, name): value for name, value in held_out.items()}

    def read(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Figures of a file by the names of `HeldOut`, also of files from before `written`."""
        names = {key: name for name, key in OTHER_KEYS.items()}
        return {names.get(key, key): value for key, value in figures.items()}


KL = Measure()
SPANS = Measure("span divergence", "aligned span", "divergence")


def over_stored(manifest: Mapping[str, Any]) -> Measure:
    """The measure of a run from a cache, by the cache's manifest."""
    if manifest.get("kind") == "hidden":
        return KL
    k, temperature = manifest["k"], float(manifest["temperature"])
    name = {"bucket": f"KL over {k + 1} outcomes", "renormalize": f"KL over {k} tokens", "sampled": "estimated KL"}
    return Measure(name[manifest["tail"]] + ("" if temperature == 1 else f" at T = {temperature:g}"))


def shown(value: float) -> str:
    """A figure for people; NaN where a run's teacher cannot tell it, such as the reverse KL of sampled tokens."""
    return "unknown" if math.isnan(value) else f"{value:.4f}"
