"""Looks for the host faults that make multi-GPU serving slow, from the system's own tools."""
