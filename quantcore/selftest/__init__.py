"""The self-test: the engine's computations on a device beside those on the CPU, for those who have a device."""
