"""The queue of jobs: their states, leases, seats, events, and the upkeep that keeps them moving."""
