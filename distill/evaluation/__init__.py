"""After a run: held-out figures with their confidence, samples, comparisons."""
