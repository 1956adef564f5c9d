"""Calibration text: from files, the Hub or datasets to documents, and from documents to windows of tokens."""
