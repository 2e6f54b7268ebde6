"""A teacher with another tokenizer: both readings of a text aligned by bytes, and what is compared."""
