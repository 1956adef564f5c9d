"""Describes the result of a job: report, page, model card, command that reproduces it."""
