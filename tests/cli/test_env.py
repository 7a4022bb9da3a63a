"""``grpojax env``: what is there, as text and as JSON; no secrets."""

import importlib.metadata
import json
import re

import jax
import pytest
from refusals import check_said

from grpojax.cli import env
from grpojax.cli import main as cli


@pytest.fixture
def said(capsys, monkeypatch, tmp_path):
    """What a command prints, with a compile cache of its own."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "a").write_bytes(bytes(3 * 2**20))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(cache))

    def run(*arguments):
        assert cli.main(["env", *arguments]) == 0
        return capsys.readouterr().out

    return run


def test_json_has_versions_devices_and_variables(said, monkeypatch, tmp_path):
    monkeypatch.setenv("GRPOJAX_API_TOKEN", "hunter2")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--some=1")
    monkeypatch.setenv("UNRELATED", "private")
    text = said("--json")
    found = json.loads(text)
    assert found["versions"]["jax"] == jax.__version__
    assert found["versions"]["orbax-checkpoint"] == importlib.metadata.version("orbax-checkpoint")
    assert found["machine"]["cpus"] >= 1 and found["machine"]["memory_bytes"] > 2**28
    devices = found["devices"]
    assert (devices["platform"], devices["count"], devices["processes"]) == ("cpu", jax.device_count(), 1)
    assert found["environment"]["LIBTPU_INIT_ARGS"] == "--some=1" and "mesh" not in found
    assert found["compile_cache"] == {"folder": str(tmp_path / "cache"), "bytes": 3 * 2**20}
    assert "hunter2" not in text and "private" not in text and "GRPOJAX_API_TOKEN" in found["environment"]


def test_text_says_the_same_with_the_mesh_of_a_recipe(said, tmp_path):
    lines = dict(re.split(r" {2,}", line, maxsplit=1) for line in said("quickstart", "mesh.tensor=2").splitlines())
    assert lines["jax"] == jax.__version__ and lines["devices"] == f"{jax.device_count()} x cpu (cpu)"
    assert lines["mesh"] == f"data 1, fsdp {jax.device_count() // 2}, expert 1, tensor 2"
    assert lines["compile cache"] == f"{tmp_path / 'cache'}, 3.0 MiB"


def test_a_mesh_that_cannot_be_is_part_of_the_report(said):
    assert "needs" in json.loads(said("quickstart", "mesh.data=7", "mesh.fsdp=11", "--json"))["mesh"]["problem"]
    assert "mesh" in said("supervised/sft")  # any recipe has one


def test_devices_are_left_alone_if_it_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(env, "_devices", lambda: pytest.fail("looked for devices"))
    monkeypatch.setattr(jax, "devices", lambda: pytest.fail("looked for devices"))
    assert cli.main(["env", "quickstart", "--no-devices"]) == 0
    assert "mesh" not in capsys.readouterr().out


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(env, "ALWAYS", ("jax", "no-such-package"))
    found = env.versions()
    assert found["no-such-package"] is None and not {"jax-cuda12-plugin", "numpy"} & found.keys()


def test_a_recipe_that_cannot_be_read_is_a_mistake(capsys):
    assert cli.main(["env", "quikstart"]) == 2
    check_said("did you mean quickstart?", capsys)
