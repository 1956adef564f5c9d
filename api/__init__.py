"""The HTTP service. It owns the database (``api.store``) and never imports the worker: tasks are sent by name."""
