"""What must hold for every recipe, and `distill doctor`, which measures it."""
