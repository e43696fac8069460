"""Pages from templates: one file each, nothing to load, every text escaped."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import eaglelab
from eaglelab.report.trees import Answers, as_json


def render(template: str, trees: Sequence[Answers] = (), **values: Any) -> str:
    """Fill a template of `templates/` that extends `base.html.j2`.

    trees: what the tree viewer of the page offers; none: no viewer and no script.
    values: for the template; text is escaped unless it is `markupsafe.Markup`.
    """
    environment = Environment(
        loader=PackageLoader("eaglelab.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script, style = (source(environment, name) for name in ("viewer.js", "style.css"))
    return environment.get_template(template).render(
        script=Markup(script),
        script_digest="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=Markup(style),
        trees=list(trees),
        trees_json=Markup(as_json({"sources": [one.to_dict() for one in trees]})),
        version=eaglelab.__version__,
        **values,
    )


def source(environment: Environment, name: str) -> str:
    """A file of ours as it is; its text must not end the element that it goes into."""
    assert environment.loader is not None
    text, _, _ = environment.loader.get_source(environment, name)
    assert "</s" not in text.lower()
    return text


def write_page(path: Path, text: str) -> Path:
    """The old page stays whole until the new one is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.partial")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)
    return path
