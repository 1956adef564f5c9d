"""Runs the algorithms of a job on one decoder block after another, and keeps the progress in a savepoint."""
