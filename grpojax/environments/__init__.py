"""Problems that are made, not read, and what judges their answers.

Each module has ``rows(name, options)``, the rows of the source ``SCHEME:name``; `grpojax.data.readers.GENERATED` knows
it by its import path and imports it when a recipe names it. A score of its own is a reward function.
"""
