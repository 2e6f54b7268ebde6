"""Teacher and student: loading, pruning, adapters, how heads are read, our kernels inside them, vocabulary."""
