"""Pages in headless Chromium: no error, no request, a viewer that steps, and texts that stay texts."""

import html
import json
import re

import pytest

from eaglelab.report import write_trees
from tests.report.conftest import ATTACK
from tests.report.pages import CHROMIUM, driven, open_page

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt-get install chromium)")


@pytest.fixture(scope="module")
def trees(measured, tmp_path_factory):
    return write_trees(measured / "cells", tmp_path_factory.mktemp("trees") / "trees.html")


STEPS = """
const view = document.getElementById("trees"), part = (name) => view.querySelector(`[data-part="${name}"]`);
const log = [];
const note = (what) => log.push({
  what, place: part("place").textContent, nodes: view.querySelectorAll("g.node").length, title: document.title,
  dropped: view.querySelectorAll("g.node.dropped").length, accepted: view.querySelectorAll("g.node.accepted").length,
  bonus: view.querySelectorAll("g.node.bonus").length, before: part("text").querySelector(".before").textContent,
  published: part("text").querySelector(".accepted").textContent + part("text").querySelector(".bonus").textContent,
});
note("start");
part("next").click(); note("next");
view.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight", bubbles: true})); note("right");
part("previous").click(); note("previous");
view.dispatchEvent(new KeyboardEvent("keydown", {key: "End", bubbles: true})); note("end");
part("next").click(); note("past the end");
part("slider").value = 1; part("slider").dispatchEvent(new Event("input")); note("slider");
part("overview").querySelectorAll("g")[2].dispatchEvent(new Event("click")); note("overview");
part("dropped").click(); note("dropped");
part("answer").value = 1; part("answer").dispatchEvent(new Event("change")); note("answer");
part("source").value = 1; part("source").dispatchEvent(new Event("change")); note("source");
const written = document.createElement("pre");
written.id = "log";
written.textContent = JSON.stringify(log);
document.body.append(written);
"""


def test_the_viewer_steps_through_rounds(trees, tmp_path):
    opened = driven(trees, tmp_path, STEPS)
    assert opened.console == []
    written = re.search(r'<pre id="log">(.*?)</pre>', opened.dom, re.DOTALL)
    log = {one["what"]: one for one in json.loads(html.unescape(written.group(1)))}
    data = json.loads(re.search(r'id="trees-data">(.*?)</script>', trees.read_text(), re.DOTALL).group(1))
    source = data["sources"][0]
    rounds = source["answers"][0]["rounds"]
    last = len(rounds)
    places = {what: int(one["place"].split()[1]) for what, one in log.items()}
    assert [places[what] for what in ("start", "next", "right", "previous")] == [1, 2, 3, 2]
    assert (places["end"], places["past the end"], places["slider"], places["overview"]) == (last, last, 2, 3)
    for what in ("start", "next", "right", "end"):
        one, seen = rounds[places[what] - 1], log[what]
        assert seen["nodes"] == 1 + one["kept"] + (one["bonus"] is not None)
        assert seen["accepted"] == len(one["accepted"])
        assert seen["bonus"] == (one["bonus"] is not None)
        assert seen["dropped"] == 0
        assert seen["published"] == "".join(one["published"])
        assert seen["before"] == source["answers"][0]["opening"] + "".join(
            piece for earlier in rounds[: places[what] - 1] for piece in earlier["published"]
        )
    assert log["dropped"]["dropped"] == len(rounds[2]["tokens"]) - rounds[2]["kept"] > 0
    assert log["answer"]["place"] == f"Round 1 of {len(source['answers'][1]['rounds'])}"
    assert log["source"]["place"].endswith(f"of {len(data['sources'][1]['answers'][1]['rounds'])}")
    assert {one["title"] for one in log.values()} == {"Draft trees of cells"}, "a token ran as a script"


def test_the_page_of_trees_opens_where_asked(trees, tmp_path):
    opened = open_page(trees, tmp_path, "#round=2")
    assert opened.console == []
    assert ">Round 2 of" in opened.dom


@pytest.mark.parametrize("name", ["report", "trees"])
def test_a_page_asks_for_nothing_and_runs_no_text(reported, trees, tmp_path, name):
    page = {"report": reported / "report.html", "trees": trees}[name]
    opened = open_page(page, tmp_path)
    assert opened.console == []
    assert opened.requests == []
    assert "<title>attacked" not in opened.dom
    assert ATTACK not in opened.dom, "as an element"
    assert html.escape(ATTACK, quote=False) in opened.dom, "as a text"
    assert 'class="node root"' in opened.dom, "the page's own script ran under its policy"


def test_a_request_would_be_seen(tmp_path):
    (tmp_path / "page.html").write_text('<img src="http://127.0.0.1:9/picture.png"><script>nothing.here</script>')
    opened = open_page(tmp_path / "page.html", tmp_path)
    assert "http://127.0.0.1:9/picture.png" in opened.requests
    assert "nothing is not defined" in opened.console[0]
