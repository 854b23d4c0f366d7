"""The database: every measurement with its provenance, beside Optuna's tables."""
