"""Compares a device with the CPU."""
