"""The training itself: objective, trainer, metrics, checkpoints, health, several GPUs."""
