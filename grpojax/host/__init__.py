"""What every process needs before there is a model: errors, settings, files, console, other processes."""
