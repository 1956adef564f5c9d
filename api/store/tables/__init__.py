"""The tables. What must never happen is a constraint here, not a hope in the code."""
