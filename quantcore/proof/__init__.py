"""The proof: reads the written files in a fresh process and compares them with the computed results."""
