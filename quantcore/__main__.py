"""``python -m quantcore``: the engine without a server."""

import sys

from quantcore.cli.main import main

sys.exit(main())
