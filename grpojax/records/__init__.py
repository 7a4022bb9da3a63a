"""The files of a run: its directory, checkpoints, metrics, samples, evaluations."""
