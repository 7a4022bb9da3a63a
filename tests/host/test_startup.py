"""What stands before jax is imported."""

import logging
import os
import sys

from grpojax.host import startup
from grpojax.host.console import log


def test_reward_functions_in_this_folder_can_be_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    startup.prepare()
    startup.prepare()
    assert sys.path[-1] == str(tmp_path) and sys.path.count(str(tmp_path)) == 1


def test_what_is_set_in_the_environment_stays(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.delenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", raising=False)
    startup.prepare()
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    assert os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] == "1"


def test_lines_go_to_standard_output_with_the_time(capsys):
    startup.prepare()
    log.info("step %d", 3)
    log.debug("nothing")
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and out.endswith(" step 3\n") and out[2] == out[5] == ":"
    assert log.level == logging.INFO
