"""Whether a setting took effect, and whether it could matter: one judgement for all backends."""
