"""Measurements that a person runs and reads; nothing here is a test."""
