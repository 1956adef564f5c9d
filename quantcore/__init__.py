"""quantcore: the quantization engine of Bitfoundry. Knows torch; knows nothing of HTTP, SQL or Celery.

A user of the library finds everything here: ``from quantcore import Config, ModelQuantizer``. The names are listed in
``__init__.pyi``, and are loaded when they are first used, so that ``import quantcore`` loads no torch.
"""

from __future__ import annotations

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
