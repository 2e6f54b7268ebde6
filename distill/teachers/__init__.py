"""Teachers: loaded, remote or cached, alone or several at once, with the student's tokenizer or another."""
