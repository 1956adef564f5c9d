"""Finds the result that meets a goal: what runs well where it is meant for, what fits, and what is good enough."""
