"""Reading pages: their tables and references, and what headless Chromium makes of them."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--enable-logging=stderr",
    "--virtual-time-budget=2000",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # nothing leaves the machine
]


class Page(HTMLParser):
    """Tables as lists of rows of texts, attributes that could load something, and element names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.references: list[str] = []
        self.elements: list[str] = []
        self._cell: list[str] | None = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append(tag)
        self.references += [
            value for name, value in attributes if name.split(":")[-1] in ("src", "href", "srcset", "data")
        ]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self._cell = []

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)

    def handle_data(self, data):
        if self._cell is not None:
            self._cell.append(data)

    def handle_endtag(self, tag):
        if tag in ("td", "th") and self._cell is not None:
            self.tables[-1][-1].append("|".join(part.strip() for part in self._cell if part.strip()))
            self._cell = None


@dataclasses.dataclass(frozen=True)
class Opened:
    """A page in the browser.

    dom: after its scripts ran.
    console: what they, and the browser about them, said.
    requests: addresses that the page asked for, its own file apart.
    """

    dom: str
    console: list[str]
    requests: list[str]


def open_page(page: Path, folder: Path, fragment: str = "") -> Opened:
    assert CHROMIUM is not None
    net = folder / "net.json"
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", f"--log-net-log={net}", "--dump-dom"]
    done = subprocess.run(
        [*command, page.resolve().as_uri() + fragment], capture_output=True, text=True, timeout=120, check=True
    )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    events = json.loads(net.read_text())["events"]
    asked = [event["params"] for event in events if "initiator" in event.get("params", {})]
    requests = [one["url"] for one in asked if one["initiator"] != "not an origin"]  # those are the browser's own
    return Opened(done.stdout, console, requests)


def driven(page: Path, folder: Path, script: str) -> Opened:
    """The page with a script of the test behind its own, for which the page's policy is taken away."""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    copy = folder / "driven.html"
    copy.write_text(text.replace("</body>", f"<script>{script}</script></body>"))
    return open_page(copy, folder)
