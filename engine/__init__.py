"""The tensor-parallel speculative Mixture-of-Experts engine."""
