"""Reads a server's command line, environment and log, and says what is wrong, without a GPU."""
