"""The commands that run a model: evaluate, compare, convert, auto, speed."""
