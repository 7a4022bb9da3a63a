"""The page of a report in a browser: on narrow and wide screens, in light and dark, by keys, without a network."""

import html
import json
import re
import shutil
import subprocess

import pytest
import report_runs

from grpojax.cli import main as cli

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PROBE = """
<script>addEventListener("load", () => {
  const shown = () => [...document.querySelectorAll("figure .dot")].filter(x => x.getClientRects().length);
  const focused = (x) => { x.focus(); return document.activeElement === x; };
  const press = (x, key) => x.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
  const charts = [...document.querySelectorAll("figure svg[tabindex]")].filter(x => x.checkVisibility());
  const controls = [...document.querySelectorAll("input, summary, .scroll[tabindex], svg[tabindex]")];
  const found = {
    width: innerWidth,
    needs: document.documentElement.scrollWidth,
    paper: getComputedStyle(document.body).backgroundColor,
    fetched: performance.getEntriesByType("resource").map(x => x.name),
    reached: controls.filter(x => x.checkVisibility()).map(focused),
    charts: charts.length,
    told: charts.map(x => { focused(x); press(x, "ArrowRight");
                            return x.closest("figure").querySelector(".readout").textContent; }),
    dots: [shown().length],
  };
  document.getElementById("show-1").click();
  found.dots.push(shown().length);
  document.getElementById("axis-tokens").click();
  found.dots.push(shown().length);
  document.documentElement.dataset.found = JSON.stringify(found);
})</script>
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Of two methods; as the command writes it, and a look at it."""
    folder = tmp_path_factory.mktemp("report")
    data = report_runs.write_data(folder / "data.jsonl")
    for seed in (0, 1):
        report_runs.write_run(folder / "runs" / f"grpo_{seed}", "grpo", seed, 0.25, data=data)
        report_runs.write_run(folder / "runs" / f"gspo_{seed}", "gspo", seed, 0.5, data=data)
    out = folder / "page.html"
    assert cli.main(["report", str(folder / "runs"), "--to", str(out)]) == 0
    out.write_text(out.read_text(encoding="utf-8").replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    return out


def look(page, width, dark):
    """What the page finds out of itself once it is shown, and what the browser complains of."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--window-size={width},900"]
    options.append(f"--user-data-dir={page.parent / 'profile'}")
    options.append(f"--blink-settings=preferredColorScheme={0 if dark else 1}")
    command = [CHROMIUM, *options, "--virtual-time-budget=5000", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found, done.stderr[-3000:]
    return json.loads(html.unescape(found[1])), [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.in_ci("wide and light")
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize(("width", "dark"), [(500, True), (1200, False)], ids=["narrow and dark", "wide and light"])
def test_it_is_shown_whole_and_told_by_keys(page, width, dark):
    found, complaints = look(page, width, dark)
    assert complaints == [] and found["fetched"] == []
    assert found["width"] == width and found["needs"] <= width  # only tables scroll, in a box of their own
    assert found["paper"] == ("rgb(20, 24, 29)" if dark else "rgb(255, 255, 255)")
    assert found["charts"] >= 8 and all(found["reached"]) and len(found["reached"]) >= found["charts"] + 5
    assert all(re.match(r"(grpo|gspo)\b.*\d", said) for said in found["told"]), found["told"]
    both, one, by_tokens = found["dots"]
    assert both > one > 0 and by_tokens > 0 and both == 2 * one
