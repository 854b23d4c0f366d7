"""Autotune: studies, search, store, backends, reports and the command line."""
