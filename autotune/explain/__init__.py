"""Where the time of knobs goes, what could make them faster, and what cannot matter."""
