"""Generation: batched decoding, on-policy rollouts in training, and `distill sample`."""
