"""Number formats and memory of models: dtypes, FP8, quantisation for training, offloading to host memory."""
