"""What a run keeps on disk: its directory, checkpoints, metrics, samples, evaluations."""
