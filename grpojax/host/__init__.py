"""The basics of every process: errors, settings, files, console, other processes."""
