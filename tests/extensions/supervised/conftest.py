import fake_programs
import pytest

from grpojax.extensions.supervised import finetune


@pytest.fixture
def fakes():
    """Supervised runs that the test opens have plain functions in place of programs, as others do."""
    with fake_programs.in_place((finetune, "make_supervised_programs")):
        yield
