"""The day that prompts are written on stays that of a run's start."""

import dataclasses
import datetime
import json

import pytest
from chat_templates import tokenizer_of

from grpojax.data import DataConfig
from grpojax.host import processes, settings
from grpojax.run.today import with_day


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    data: DataConfig


def recipe(**options):
    return settings.build(Recipe, {"data": {"train": "-", **options}})


@pytest.fixture
def clock(monkeypatch):
    """Sets the day on which `with_day` is called."""

    def set_to(day):
        class Day(datetime.date):
            @classmethod
            def today(cls):
                return cls.fromisoformat(day)

        monkeypatch.setattr(datetime, "date", Day)

    return set_to


def test_a_run_that_goes_on_later_keeps_its_day(tmp_path, clock):
    clock("2026-03-01")
    first = with_day(recipe(), tokenizer_of("dated"), tmp_path)
    assert str(first.data.today) == "2026-03-01"
    (tmp_path / "config.json").write_text(json.dumps(settings.to_dict(first)))
    clock("2026-03-02")
    again = with_day(recipe(), tokenizer_of("dated"), tmp_path)
    assert settings.to_dict(again) == settings.to_dict(first)
    assert str(with_day(recipe(), tokenizer_of("dated"), tmp_path / "new").data.today) == "2026-03-02"
    assert str(with_day(recipe(), tokenizer_of("dated")).data.today) == "2026-03-02"
    # One that is given stays, and the run's directory refuses it where it is another.
    given = recipe(today="2026-02-01")
    assert with_day(given, tokenizer_of("dated"), tmp_path) is given


@pytest.mark.parametrize("template", ["plain", None])
def test_a_template_that_writes_no_day_has_none(template, tmp_path):
    plain, dated = recipe(), recipe(template="plain")
    assert with_day(plain, tokenizer_of(template), tmp_path) is plain
    assert with_day(dated, tokenizer_of("dated"), tmp_path) is dated


@pytest.mark.parametrize("stored", ["", "[]", "{}", '{"data": {}}', '{"data": {"today": null}}'])
def test_a_directory_without_a_day_has_todays(stored, tmp_path, clock):
    clock("2026-03-01")
    (tmp_path / "config.json").write_text(stored)
    assert str(with_day(recipe(), tokenizer_of("dated"), tmp_path).data.today) == "2026-03-01"


def test_all_processes_take_the_first_ones_day(monkeypatch):
    monkeypatch.setattr(processes, "meet", lambda word: ["2026-02-28", word])
    assert str(with_day(recipe(), tokenizer_of("dated")).data.today) == "2026-02-28"
