"""quantcore: the quantization engine of Bitfoundry. Knows torch; knows nothing of HTTP, SQL or Celery."""

__version__ = "0.1.0"
