"""Training: trainer, metrics, checkpoints, resuming, guards against failing steps, several GPUs."""
