"""Programs that serve a result, run in their own environments: speed and tasks measured there."""
