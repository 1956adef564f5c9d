"""How a job goes: the main path in `job`, and what it is made of."""
