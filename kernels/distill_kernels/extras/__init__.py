"""What training does not need: softmax, KL of probabilities, linear layers without cuBLAS, a key-value cache."""
