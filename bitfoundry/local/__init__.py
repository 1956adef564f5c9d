"""The whole service on one machine: PostgreSQL, Valkey, the API and a worker as children of one command."""
