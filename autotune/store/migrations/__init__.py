"""Alembic migrations of our tables (Optuna migrates its own)."""
