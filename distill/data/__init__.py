"""Data of a run, from the recipe's `data:` to batches: sources, formats, chat templates, tokens, packing, collator."""
