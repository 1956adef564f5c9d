"""The database tables. Constraints rule out what must never happen; the code alone could not."""
