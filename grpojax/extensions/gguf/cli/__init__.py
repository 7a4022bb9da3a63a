"""Its commands, a file for each."""
