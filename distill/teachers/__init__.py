"""Teachers of other kinds than one loaded model: on disk, several at once, with another tokenizer."""
