"""Notes on open episodes, as a resumed run finds them."""

from grpojax.extensions.episodes.open_episodes import Notes
from grpojax.host import files

A, B = (3, 0), (3, 1)


def notes_of(folder, number=7):
    notes = Notes(files.path(folder))
    notes.begin(number)
    return notes


def stopped(folder):
    """Notes of a rollout in which A has had two answers and is over, and B none."""
    notes = notes_of(folder)
    notes.open([A, B])
    assert not notes.differs(A, {"question": "1"}, None) and not notes.differs(A, "add", ["2"])
    notes.write([B])
    return notes


def test_what_was_open_is_known_in_the_same_rollout_only(tmp_path):
    assert not stopped(tmp_path).was_open(B)
    assert [notes_of(tmp_path).was_open(e) for e in (A, B, (4, 0))] == [False, True, False]
    assert not notes_of(tmp_path, number=8).was_open(B)


def test_another_observation_after_the_same_actions_differs_once(tmp_path):
    stopped(tmp_path)
    for row, action, seen, differs in (
        ({"question": "1"}, "add", [None, "2"], [False, False]),
        ({"question": "1"}, "add", [None, "3"], [False, True]),
        ({"question": "1"}, "add", ["x", "3"], [True, False]),
        ({"question": "1"}, "sub", [None, "3"], [False, False]),
        ({"question": "2"}, "add", [None, "3"], [False, False]),
    ):
        notes = notes_of(tmp_path)
        notes._now = {A: [], B: []}  # `open` would write
        found = [notes.differs(A, row, seen[0]), notes.differs(A, action, [seen[1]])]
        assert found == differs and not notes.differs(A, "more", None) and not notes.differs(B, row, None)


def test_notes_of_processes_that_are_gone_are_read_once(tmp_path):
    """They were of another process, whose episodes the first one draws now."""
    stopped(tmp_path)
    (tmp_path / "open_0.json").rename(tmp_path / "open_3.json")
    others = {"a.json": "{", "b.json": '{"rollout": 7}', "open_1.json.tmp": "x", "c.json": "[1]"}
    for name, content in others.items():
        (tmp_path / name).write_text(content)
    notes = notes_of(tmp_path)
    assert (tmp_path / "open_3.json").exists(), "nothing else says so before the rollout is noted again"
    notes.open([A, B, (5, 0)])
    notes.write([(5, 0)])
    assert [notes.was_open(e) for e in (A, B, (5, 0))] == [False, True, False]
    assert {place.name for place in tmp_path.iterdir()} == {*others, "open_0.json"}
    assert [notes_of(tmp_path).was_open(e) for e in (A, B, (5, 0))] == [False, False, True]


def test_a_disk_that_is_full_does_not_stop_the_run(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write", full)
    stopped(tmp_path)
    assert caplog.text.count("No space left") == 1


def test_the_run_waits_for_no_answer_of_a_bucket(tmp_path, monkeypatch):
    """Where storage is out, a request is tried again for a minute; the thread of uploads does that."""
    notes, asked, given = notes_of(tmp_path), [], []
    monkeypatch.setattr(files, "in_bucket", lambda _: True)
    monkeypatch.setattr(files, "make_folder", asked.append)
    monkeypatch.setattr(files.Uploads, "write", lambda _, file, content: given.append(file.name))
    notes.open([A, B])
    notes.write([A])  # sooner than an object may be replaced
    assert given == ["open_0.json"] and not asked
    notes._wrote -= 6
    notes.write([A])
    assert given == ["open_0.json"] * 2
