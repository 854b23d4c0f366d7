"""Readers of runs that other tools left behind: server logs, /metrics, benchmark results."""
