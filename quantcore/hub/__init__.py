"""The Hugging Face Hub: downloads of models, uploads of results, and errors with hints."""
