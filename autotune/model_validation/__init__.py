"""Predictions of the model against data files: ``autotune model validate`` and ``model show``."""
