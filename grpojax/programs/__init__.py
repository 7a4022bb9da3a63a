"""The jitted programs: the sampler, updates by any loss, and scoring; also the state and the rows that they use."""
