"""The parts that all routes share: connections, limits, keys, errors, health."""
