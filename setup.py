"""What pyproject.toml cannot say: `configs/` of the repository is `grpojax/configs/` of the wheel."""

from setuptools import find_namespace_packages, setup

recipes = ["grpojax.configs", *(f"grpojax.configs.{folder}" for folder in find_namespace_packages("configs"))]
setup(
    packages=[*find_namespace_packages(include=["grpojax*"]), *recipes],  # a folder without Python is one to setuptools
    package_dir={"grpojax.configs": "configs"},
)
