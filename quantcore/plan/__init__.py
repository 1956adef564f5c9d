"""Plans a job from headers alone: layers, memory, size. No torch."""
