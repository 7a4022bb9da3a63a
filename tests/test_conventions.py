"""Files that other programs and people look for: citation, security, llms.txt, templates, types."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()  # what version 1.2.0 requires
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software"
    ours = (PROJECT["name"], PROJECT["version"], PROJECT["license"])
    assert (cited["title"], cited["version"], cited["license"]) == ours
    assert [list(author) for author in cited["authors"]] == [["name"]]  # an entity, not a person


def test_llms_txt_has_a_title_a_summary_and_links_that_exist():
    text = (ROOT / "llms.txt").read_text()
    assert re.match(r"# grpojax\n\n> .+\n", text)
    links = re.findall(r"^- \[.+?\]\((.+?)\): .+$", text, re.M)
    assert len(links) == text.count("\n- ")
    assert not [link for link in links if not (ROOT / link).exists()]


@pytest.mark.parametrize("page", ["SECURITY.md", ".github/PULL_REQUEST_TEMPLATE.md"])
def test_every_file_that_a_page_names_exists(page):
    named = re.findall(r"\b(?:grpojax|tests|tpu_scripts)/[\w./-]*\w|\b[A-Z]+\.md\b", (ROOT / page).read_text())
    assert named and not [name for name in named if not (ROOT / name).exists()]


def test_no_code_of_models_is_run():
    """As SECURITY.md says."""
    assert not [p for p in (ROOT / "grpojax").rglob("*.py") if "trust_remote_code" in p.read_text(encoding="utf-8")]


def test_a_bug_report_asks_for_the_environment():
    forms = {p.stem: yaml.safe_load(p.read_text()) for p in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")}
    bug = {field["id"]: field for field in forms["bug"]["body"]}
    assert "grpojax env" in bug["env"]["attributes"]["label"] and bug["env"]["validations"]["required"]
    for name in ("bug", "feature"):
        assert {"name", "description", "body"} <= forms[name].keys()
        assert all(field["attributes"]["label"] for field in forms[name]["body"])
