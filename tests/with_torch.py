"""torch, for comparisons with transformers' own models. Whoever imports this module is skipped where it is absent."""

import pytest

torch = pytest.importorskip("torch", reason="torch is absent: pip install 'grpojax[test-all]'")
