"""Where results go by default; apart, so that a command can say so without loading a database."""

DEFAULT_URL = "sqlite:///autotune.db"
