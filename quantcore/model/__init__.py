"""A model's modules: a skeleton without weights, the names of its tensors, experts, small twins."""
