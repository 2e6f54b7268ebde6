"""What a teacher says, written to disk: caches, their error, sampled answers."""
