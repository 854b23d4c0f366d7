"""optuna-dashboard with our evidence: a note per trial, and plots of prediction against measure."""
