"""Measures a host and writes its machine file."""
