"""The time limits of calls to other systems, in seconds: no call waits for ever, and here is how long each one waits.

A system that hangs is not one that is gone: it accepts connections and says nothing. Every client of PostgreSQL, the
broker, the Hub, webhooks' receivers and an OpenID provider is made with these
(tests/architecture/test_time_limits.py).
"""

from __future__ import annotations

DATABASE_CONNECT_S = 5
DATABASE_ANSWER_S = 10.0
"""For a statement of a worker; ``API_ANSWER_S`` for one of a request."""
DATABASE_WAIT_S = 5.0
"""For a connection of the pool, and for a lock."""
DATABASE_SILENT_S = 1.0
"""Time that we wait for an answer beyond the server's own limit for a statement. For as long, after an answer that did
not come, nobody asks the server again."""
DATABASE_IDLE_S = 30
"""For an idle transaction: after it a process that is suspended in one loses its locks."""
DATABASE_MIGRATION_S = 3600
"""For a statement that changes the schema."""

API_WAIT_S = 2.0
"""For a connection or a lock: a request waits for three of these at most, then it is 503."""
API_ANSWER_S = 5.0

BROKER_S = 2.0
"""For an answer to a message, and to connect."""
BROKER_COUNT_S = 0.25
"""For the counters of requests and streams: a request waits no longer."""

HUB_S = 10.0
"""To connect to the Hub, and for its answer to a question."""
HUB_TRANSFER_S = 60.0
"""For the next bytes of a download, and for the answer to an upload or a commit."""

STORE_CONNECT_S = 10.0
"""To connect to an object store."""
STORE_TRANSFER_S = 60.0
"""For a part of a file, and for all tries of a request."""

WEBHOOK_S = 15.0
"""For all of an attempt."""

OIDC_S = 5.0
"""For all of an answer of the OpenID provider; a sign-in asks it four questions at most."""

LOCAL_S = 5.0
"""For our own servers on this machine, while ``bitfoundry up`` starts and tends them."""
