"""The page of a report: it fetches nothing, holds together, can be read, and says what is in the runs."""

import json
import re
import struct
import subprocess
import sys
from html.parser import HTMLParser
from importlib import resources

import matplotlib
import pytest
import report_runs

from grpojax.cli import main as cli
from grpojax.extensions.experiments import report
from grpojax.extensions.experiments.report_charts import chart, picture
from grpojax.extensions.experiments.report_page import page

VOID = {"meta", "input", "br", "link", "img"}


class Page(HTMLParser):
    """Elements in order, and whether each was closed where it should be."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.texts = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), (tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder and the page of two methods, one of them with a model whose name needs escaping."""
    folder = tmp_path_factory.mktemp("report")
    data = report_runs.write_data(folder / "data.jsonl")
    for seed in (0, 1):
        report_runs.write_run(folder / "runs" / f"grpo_{seed}", "grpo", seed, 0.25, data=data)
        other = report_runs.write_run(folder / "runs" / f"gspo_{seed}", "gspo", seed, 0.5, data=data)
        (other / "config.json").write_text((other / "config.json").read_text().replace("builtin:tiny", "<&'>"))
    report_runs.write_run(
        folder / "runs" / "grpo_9", "grpo", 9, 0.5, data=data, done=2, ended="killed, for all one knows"
    )
    out = folder / "out" / "page.html"
    assert cli.main(["report", str(folder / "runs"), "--to", str(out), "--json", str(folder / "numbers.json")]) == 0
    return folder, out.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def parsed(made):
    return Page(made[1])


@pytest.mark.slow
def test_every_element_is_closed_where_it_was_opened(parsed):
    assert parsed.open == [] and parsed.elements[0][0] == "html"


@pytest.mark.slow
def test_nothing_is_fetched(made, parsed):
    text = made[1]
    assert not re.search(r"https?:|@import|url\(", text)
    for tag, attrs in parsed.elements:
        assert tag not in ("link", "img", "iframe", "object"), tag
        assert not {"src", "xlink:href", "data"} & attrs.keys(), (tag, attrs)
        assert attrs.get("href", "#").startswith("#"), (tag, attrs)  # a part of the page


@pytest.mark.slow
def test_every_id_is_there_once_and_every_reference_is_one(made, parsed):
    ids = [attrs["id"] for _, attrs in parsed.elements if "id" in attrs]
    assert len(ids) == len(set(ids)) > 10
    named = [attrs[k] for _, attrs in parsed.elements for k in ("for", "aria-labelledby") if k in attrs]
    style = made[1].partition("<style>")[2].partition("</style>")[0]
    named += re.findall(r"#((?:show|axis)-[\w-]+)", style)
    named += [attrs["href"][1:] for _, attrs in parsed.elements if "href" in attrs]
    assert named and set(named) <= set(ids)


def test_headings_are_in_order(parsed):
    levels = [int(tag[1]) for tag, _ in parsed.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b <= a + 1 for a, b in zip(levels, levels[1:], strict=False))


def test_charts_have_titles_and_inputs_labels(parsed):
    svgs = [attrs for tag, attrs in parsed.elements if tag == "svg"]
    assert all(a.get("role") == "img" and "aria-labelledby" in a or a.get("aria-hidden") == "true" for a in svgs)
    assert {a["class"] for a in svgs if "role" in a} == {"by-steps", "by-tokens", "by-flops", "by-minutes"}
    inputs = [i for i, (tag, _) in enumerate(parsed.elements) if tag == "input"]
    assert len(inputs) == 6 and all(parsed.elements[i - 1][0] == "label" for i in inputs)


def test_it_says_what_is_in_the_runs(parsed):
    for said in ("grpo and gspo", "5 runs of 2 methods", "2 of 6 steps, failed: killed, for all one knows",
                 "25.0", "+25.0",
                 "Runs that failed count as 0", "failed seeds", "inconclusive",
                 "No margin was stated (--margin), so that no two methods are called the same",
                 "model.path: 'builtin:tiny' -> \"<&'>\"", "<b>gspo_0</b> 0", "what is 0 < 1 & 2?", "By difficulty",
                 "gspo has the gradient of GRPO's loss"):  # fmt: skip
        assert said in parsed.text, said


def test_nothing_of_a_run_becomes_markup(parsed):
    assert not [tag for tag, _ in parsed.elements if tag == "b"]


@pytest.mark.slow
def test_a_name_of_a_method_becomes_no_markup(tmp_path):
    report_runs.write_run(tmp_path / "a", "<i>&", 0, 0.5, data=report_runs.write_data(tmp_path / "data.jsonl"))
    text = page(report.build([tmp_path / "a"]))
    parsed = Page(text)
    assert not [tag for tag, _ in parsed.elements if tag == "i"] and parsed.texts.count("<i>&") > 5
    assert "&lt;i&gt;&amp;: 0.5 at step 6</title>" in text


def test_a_point_has_its_numbers_as_a_title(made):
    """Held-out accuracy by steps, where a run of grpo failed and counts as 0; and the reward by tokens."""
    titles = re.findall(r'<use [^>]*class="dot"[^>]*><title>([^<]*)</title></use>', made[1])
    assert "grpo: 0.167 at step 6, 3 seeds" in titles and "gspo: 0.5 at step 6, 2 seeds" in titles
    assert "gspo: 0.605 at tokens drawn 600, 2 seeds" in titles


def test_many_points_have_none(tmp_path):
    for steps, dots in ((30, 30), (31, 0)):
        path = report_runs.write_run(tmp_path / str(steps), "grpo", 0, 0.5, data=None, steps=steps)
        assert chart(report.build([path]).curves[0], ["grpo"], "steps", "x").count('class="dot"') == dots


@pytest.mark.slow
def test_the_same_runs_are_the_same_bytes(made):
    """Whatever the user's own style of charts is."""
    built = report.build([made[0] / "runs"])
    names = [m.name for m in built.methods]
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 20, "svg.fonttype": "path"}):
        again = page(built), picture(built.curves, names)
    assert again == (made[1], (made[0] / "out" / "page.png").read_bytes())


@pytest.mark.slow
def test_what_draws_and_writes_pages_is_loaded_for_a_page_alone():
    experiments = "grpojax.extensions.experiments"
    code = f"import sys, {experiments}.cli.report, {experiments}.report; print(*sys.modules)"
    code += f"; import {experiments}.report_page; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = (set(line.split()) for line in done.stdout.splitlines())
    assert not {"matplotlib", "jinja2"} & before and {"matplotlib", "jinja2"} <= after
    assert "matplotlib.pyplot" not in after  # which opens windows


def test_the_picture_and_the_numbers(made):
    folder, _ = made
    head = (folder / "out" / "page.png").read_bytes()[:24]
    assert head.startswith(b"\x89PNG") and min(struct.unpack(">II", head[16:24])) > 300
    assert json.loads((folder / "numbers.json").read_text())["baseline"] == "grpo"


def test_a_page_without_any_numbers(tmp_path, capsys):
    run = report_runs.write_run(tmp_path / "a", "grpo", 0, 0.5, data=None)
    (run / "metrics.jsonl").write_text("")
    assert cli.main(["report", str(run), "--to", str(tmp_path / "a.html")]) == 0
    text = Page((tmp_path / "a.html").read_text()).text
    assert "no step recorded" in text and "nothing is tested here" in text and (tmp_path / "a.png").exists()


@pytest.mark.slow
def test_a_name_with_dollars_is_no_formula(tmp_path):
    for i, column in enumerate(("$x^^$", "y")):
        run = report_runs.write_run(tmp_path / "runs" / str(i), "grpo", 0, 0.5, data=None)
        config = json.loads((run / "config.json").read_text())
        config["data"]["prompt"] = column
        (run / "config.json").write_text(json.dumps(config))
    given = ["report", str(tmp_path / "runs"), "--by", "data.prompt", "--to", str(tmp_path / "a.html")]
    assert cli.main(given) == 0 and (tmp_path / "a.png").exists()


@pytest.mark.parametrize(("arguments", "message"), [
    (["nowhere"], "nowhere is no directory"),
    (["."], "no runs: give run directories"),
    ([".", "--to", "page.txt"], "give a name that ends in .html"),
])  # fmt: skip
def test_mistakes(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", *arguments]) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_can_be_told_from_the_page(scheme):
    """WCAG 2.1: 4.5 for text, 3 for lines."""
    style = (resources.files("grpojax.extensions.experiments") / "page/style.css").read_text("utf-8")
    block = re.findall(r":root \{(.*?)\}", style, re.S)[scheme]
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", block))
    assert len(colours) == 14 and contrast("#000000", "#ffffff") == pytest.approx(21)
    for ground in ("paper", "shade"):
        for text in ("ink", "faint", "link"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    lines = [colours[f"colour-{i}"] for i in range(8)]
    assert len(set(lines)) == 8 and all(contrast(c, colours["paper"]) >= 3 for c in lines)
