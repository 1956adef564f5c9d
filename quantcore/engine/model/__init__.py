"""The model as Transformers builds it: skeleton, names, experts, tiny copies."""
