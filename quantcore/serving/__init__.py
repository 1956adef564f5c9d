"""Programs that serve a result, run in their own environments, where speed and tasks are measured."""
