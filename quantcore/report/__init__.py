"""What a job tells about its result: report, page, model card, command that reproduces it."""
