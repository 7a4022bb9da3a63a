"""A cloud to play with."""

import pytest
import tpu_play


@pytest.fixture
def play(tmp_path):
    play = tpu_play.start(tmp_path)
    yield play
    play.clear()
