"""The steps of a job: the main path in `job`, and its parts."""
