"""The whole service on one machine: the same code as in production, with engines from wheels on unix sockets."""

from bitfoundry.postgres import Postgres
from bitfoundry.valkey import Valkey

__all__ = ["Postgres", "Valkey"]
