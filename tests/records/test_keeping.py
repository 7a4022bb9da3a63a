"""Which checkpoints stay, by their steps alone."""

from etils import epath

from grpojax.records.keeping import Keeping


def keeping(tmp_path, keep=1, **scores):
    found = Keeping(epath.Path(tmp_path) / "scores.json", keep=keep, best="x")
    for name, score in scores.items():
        found.score(int(name[1:]), {"x": score}, there=range(100))
    return found


def test_the_newest_the_best_and_the_one_that_is_held(tmp_path):
    of = keeping(tmp_path, keep=2, s2=0.5, s4=0.6, s6=0.55)
    assert of.staying([2, 4, 6, 8, 10]) == {4, 8, 10} and of.good([2, 6, 8]) == 6 and of.good([8, 10]) == 10
    of.held = 2
    assert of.staying([2, 4, 6, 8, 10]) == {2, 4, 8, 10}
    assert of.staying([]) == set() and of.good([]) is None


def test_the_one_to_go_back_to_stays_until_the_newest_is_judged(tmp_path):
    of = keeping(tmp_path)
    of.awaited = 8
    assert of.staying([4, 6, 8]) == {6, 8}  # with nothing that says which is best, the newest
    assert of.staying([4, 6, 8, 10]) == {10}  # it has been judged
    best = keeping(tmp_path, s4=0.6, s6=0.5)
    best.awaited = 8
    assert best.staying([4, 6, 8]) == {4, 8}


def test_scores_outlive_the_process_and_not_the_checkpoint(tmp_path):
    keeping(tmp_path, s2=0.5, s4=0.6)
    again = keeping(tmp_path)
    assert again.good([2, 4, 6]) == 4
    again.score(8, {"x": 0.1}, there=[2, 6])
    assert keeping(tmp_path).good([2, 4, 6, 8]) == 2
