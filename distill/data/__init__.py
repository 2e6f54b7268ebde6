"""From `data:` in the recipe to batches of tokens: sources, formats, chat templates, tokens, packing, the collator."""
