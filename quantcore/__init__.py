"""quantcore: the quantization engine of Bitfoundry. It uses torch, and does not depend on HTTP, SQL or Celery.

All public names can be imported from here: ``from quantcore import Config, ModelQuantizer``. They are listed in
``__init__.pyi`` and loaded on first use, so that ``import quantcore`` does not load torch.
"""

from __future__ import annotations

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
