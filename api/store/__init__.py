"""The database: tables, states and every query, and the upkeep that any process may do. Knows nothing of HTTP.

Postgres is the truth. Functions take an open ``Session`` and never commit: the request or the task does, at its edge.
Only the database's clock decides about time (``clock_timestamp()``), so a host with a wrong clock does no harm.
"""
