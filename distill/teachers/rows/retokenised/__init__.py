"""A teacher with another tokenizer: both readings of a text aligned by bytes, and the loss over aligned spans."""
