"""The proof: the written files are read again in a fresh process and compared with what was computed."""
