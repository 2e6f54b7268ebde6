"""A teacher that reads the same answers after another prompt: a system prompt, a worked solution, documents."""
