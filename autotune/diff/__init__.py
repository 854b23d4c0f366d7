"""What differs between two runs, what each difference is worth, and the verdict."""
