"""What models say: batched decoding, the student's own words in training, and `distill sample`."""
