"""Local runs: results that the command line made on the machine of ``bitfoundry up``."""

from api.local_runs.endpoints import router

__all__ = ["router"]
