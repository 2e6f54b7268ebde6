"""The commands of `distill`, grouped by when a person needs them; `distill.cli` puts them together."""
