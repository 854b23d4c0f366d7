"""The report of a study: one self-contained page, Markdown, or plain values."""
