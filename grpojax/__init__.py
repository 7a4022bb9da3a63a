"""Group-based reinforcement learning of language models in JAX.

The root is the mathematics, pure functions that import only jax and numpy; the folders under the line are the machine.
Each may import from those above it.

- `types`, `masked`: the arrays and their axes; float32 reductions
- `advantages`: rewards to advantages, stateless transforms joined by ``chain``
- `credit`: which tokens of a sample they go to;  `allocation`: which prompts and samples a run spends itself on
- `losses`: ratios, surrogates, divergences, corrections, aggregation, and ``policy_loss``, which joins them
- `variants`: the published methods, each a composition of these;  `diagnostics`: what to watch

---

- `host`: errors, settings, files, processes, console
- `models`: decoders, how they are sharded and scored, Hugging Face folders in and out
- `data`: problems from files to padded prompts;  `rewards`: judges, in worker processes where they may hang
- `programs`: what is jitted (sampler, update, scoring) and the state and rows that it works on
- `evaluation`: held-out problems, estimates and tests;  `records`: what a run keeps on disk
- `run`: the recipe, and what a run is made of;  `train`: its step and its loop;  `cli`: the command line
"""
