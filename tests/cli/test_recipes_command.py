"""``grpojax recipes`` lists what ships and prints what can be run."""

from recipe_files import PLAIN
from refusals import check_said

from grpojax.cli import main as cli
from grpojax.host import shipped
from grpojax.run import recipe


def test_lists_every_name_with_a_line_about_it(capsys):
    assert cli.main(["recipes"]) == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [name for name, *_ in rows] == shipped.names()
    about = {name: text for name, text in rows}
    assert (
        about["quickstart"]
        == "The built-in tiny policy learns stories of numbers, half of them of a kind that is new to it; no network."
    )
    assert max(map(len, about.values())) <= 110


def test_prints_one_that_runs_as_a_copy(tmp_path, capsys):
    assert cli.main(["recipes", "variants/dapo"]) == 0
    (tmp_path / "mine.yaml").write_text(capsys.readouterr().out)
    assert recipe.load(tmp_path / "mine.yaml", PLAIN) == recipe.load("variants/dapo", PLAIN)


def test_an_unknown_name_is_a_mistake(capsys):
    assert cli.main(["recipes", "variants/dap"]) == 2
    check_said("did you mean variants/dapo?", capsys)
