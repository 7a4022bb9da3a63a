"""Imports every module of the grpojax that is found, but for those whose packages are extras."""

import importlib
import pkgutil

import grpojax

EXTRAS = {"reasoning_gym", "textarena", "bm25s", "gguf"}
count = 0
for module in pkgutil.walk_packages(grpojax.__path__, "grpojax."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as e:
        if e.name not in EXTRAS:
            raise
    count += 1
print(f"{count} modules of {grpojax.__path__[0]}")
