"""Measures how much each layer suffers from each scheme."""
