"""The performance model: predicts every configuration. No torch, nothing of ours."""
