"""Plans a job from headers only: layers, memory, size. No torch."""
