"""Before a run: what it will take, what its batches look like, how fast a step is."""
