"""What all routes share: connections, limits, keys, errors, health."""
