"""Imports every module of the grpojax that is found. Packages of others may be missing: some are extras."""

import importlib
import pkgutil

import grpojax

names = [module.name for module in pkgutil.walk_packages(grpojax.__path__, "grpojax.", onerror=lambda _: None)]
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as e:
        if (e.name or "").startswith("grpojax"):
            raise
print(f"{len(names)} modules of {grpojax.__path__[0]}")
