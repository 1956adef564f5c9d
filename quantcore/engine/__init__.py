"""Runs models: everything that needs torch and is more than arithmetic on tensors."""
