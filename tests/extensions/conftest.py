"""Leaves out the files of tests that need another extension, where that is not installed."""

from importlib.util import find_spec

NEEDS = {
    "adapters/test_factors.py": ("delta", "int8", "mixtures"),
    "mixtures/test_experts.py": ("int8",),
    "plan/test_experts.py": ("mixtures",),
    "plan/test_planner.py": ("mixtures",),
}
collect_ignore = [
    file for file, needs in NEEDS.items() if not all(find_spec(f"grpojax.extensions.{name}") for name in needs)
]
