"""Jobs on their way: their states, leases, seats, events, and the upkeep that keeps them moving."""
