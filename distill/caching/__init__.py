"""Teacher outputs written to disk: caches, their error, sampled responses."""
