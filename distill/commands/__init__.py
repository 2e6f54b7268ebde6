"""Commands of `distill`, one file per group; `distill.cli` assembles them."""
