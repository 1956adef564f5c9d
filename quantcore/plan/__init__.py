"""What a job would do, decided from headers alone: layers, memory, size. No torch."""
