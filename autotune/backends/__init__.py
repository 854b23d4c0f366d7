"""Backends: what can measure knobs. Listing them imports neither torch nor CUDA."""
