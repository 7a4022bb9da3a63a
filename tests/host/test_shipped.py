"""Recipes by name: a file wins, a base may be a name, and a copy works in any folder."""

from pathlib import Path

import pytest

from grpojax.host import settings, shipped
from grpojax.host.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"


def test_every_recipe_of_the_repository_has_a_name():
    files = [str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yaml")]
    assert sorted(f"{name}.yaml" for name in shipped.names()) == sorted(files)


def test_a_name_is_a_recipe_and_a_file_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert settings.read("variants/dapo")["variant"] == "dapo"
    (tmp_path / "quickstart").mkdir()  # such as an export under this name
    assert settings.read("quickstart") == settings.read(CONFIGS / "quickstart.yaml")
    (tmp_path / "variants").mkdir()
    (tmp_path / "variants" / "dapo").write_text("mine: 1")
    assert settings.read("variants/dapo") == {"mine": 1}


def test_a_base_may_be_a_name(tmp_path):
    (tmp_path / "mine.yaml").write_text("base: quickstart\ntrain: {steps: 3}")
    (tmp_path / "sub.yaml").write_text("base: mine.yaml\nrun: {dir: elsewhere}")
    whole = settings.read(tmp_path / "sub.yaml")
    assert whole["train"]["steps"] == 3 and whole["run"]["dir"] == "elsewhere" and "rollout" in whole


@pytest.mark.parametrize("name", shipped.names())
def test_a_copy_means_the_same_in_another_folder(name, tmp_path):
    (tmp_path / "copy.yaml").write_text(shipped.text_of(name))
    assert settings.read(tmp_path / "copy.yaml") == settings.read(CONFIGS / f"{name}.yaml")


@pytest.mark.parametrize(
    ("given", "close"),
    [
        ("quikstart", "quickstart"),
        ("dapo", "variants/dapo"),
        ("configs/variants/dapo.yaml", "variants/dapo"),
        ("variants/dappo", "variants/dppo, variants/dapo, variants/ppo"),
        ("gsm8k", "gsm8k_lora, gsm8k_qwen2.5_0.5b"),
    ],
)
def test_an_unknown_name_lists_close_ones(given, close, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        settings.read(given)
    first, second = str(error.value).splitlines()
    assert first == f"{given}: No such file or directory" and second.endswith(f"did you mean {close}?")
    assert "`grpojax recipes`" in second


def test_what_is_like_no_name_is_told_where_names_are(tmp_path):
    with pytest.raises(UserError) as error:
        settings.read(tmp_path / "mine.yaml")
    assert str(error.value).splitlines()[1] == "`grpojax recipes` lists those that ship"


def test_an_installed_package_has_them_inside(tmp_path, monkeypatch):
    """The layout of a wheel: nothing is read from beside the package."""
    (tmp_path / "grpojax" / "configs" / "deep").mkdir(parents=True)
    (tmp_path / "configs").mkdir()
    (tmp_path / "grpojax" / "configs" / "deep" / "one.yaml").write_text("a: 1")
    (tmp_path / "configs" / "other.yaml").write_text("a: 2")
    monkeypatch.setattr(shipped, "_PACKAGE", tmp_path / "grpojax")
    assert shipped.names() == ["deep/one"] and settings.read("deep/one") == {"a": 1}
