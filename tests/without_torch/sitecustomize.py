"""Hides torch from a process that has this folder on its path: transformers imports it, in seconds, where it is there.

Nor has a user of the library torch as a rule.
"""

import importlib.util

_find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else _find(name, package)
