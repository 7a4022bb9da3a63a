"""What is jitted: the sampler, updates of any loss, scoring; and the state and the rows that these work on."""
