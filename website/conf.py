"""The configuration of Sphinx. `build` calls it."""

import json
import logging
import re
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.builders.html import StandaloneHTMLBuilder

from website.navigation import HOME, NAME, ROOT, SUMMARY, pages
from website.pictures import dark_twin
from website.synonyms import WORDS

project = NAME
version = release = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))["_template_version"]
html_title = f"{NAME} {version}"
author = ""
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_favicon = "favicon.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = [("copy.js", {"defer": "defer"})]
templates_path: list[str] = []
html_copy_source = False
html_search_scorer = str(ROOT / "website" / "scorer.js")
html_show_sphinx = False
html_show_copyright = False
language = "en"
exclude_patterns = [str(Path("files") / "**" / "*.md")]

# As where the repository is read: `page.md#what-a-heading-says`.
myst_heading_anchors = 4

# In docstrings what stands between backticks is code.
default_role = "code"
autodoc_class_signature = "mixed"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 80


def in_restructured_text(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Change the fenced code of a docstring, which has the form of Markdown, in place."""
    is_code = False
    changed: list[str] = []
    for line in lines:
        if fence := re.match(r"\s*```(\w*)$", line):
            is_code = not is_code
            changed += ["", f".. code-block:: {fence[1]}", ""] if is_code else [""]
        else:
            changed.append(f"   {line}" if is_code else line)
    lines[:] = changed


def without_links_of_type(app: Sphinx, page: nodes.document) -> None:
    """Take the link from `type` in annotations: attributes of that name are something else."""
    for link in list(page.findall(addnodes.pending_xref)):
        if link["reftarget"] == "type" and link["refdomain"] == "py":
            link.parent.replace(link, nodes.Text("type"))


def with_subjects(app: Sphinx) -> list[Any]:
    """Let the search find a page by its subject and by readers' words as by its headings."""
    assert isinstance(app.builder, StandaloneHTMLBuilder)
    index = app.builder.indexer
    assert index is not None
    for page in pages():
        for word in index.lang.split(f"{page.subject} {WORDS.get(page.name, '')}"):
            index._title_mapping.setdefault(index.lang.stem(word.lower()), set()).add(page.name)
    return []  # pages to add


def with_dark_pictures(app: Sphinx, page: nodes.document) -> None:
    """Add to each picture that has a dark twin this one; the theme shows the one that fits."""
    folder = Path(app.env.doc2path(app.env.docname)).parent
    for picture in list(page.findall(nodes.image)):
        twin = dark_twin(Path(picture["uri"]))
        if (folder / twin).is_file():
            dark = picture.deepcopy()
            dark["uri"] = twin.as_posix()
            dark["classes"].append("only-dark")
            picture["classes"].append("only-light")
            picture.parent.insert(picture.parent.index(picture) + 1, dark)


def with_description(
    app: Sphinx, name: str, template: str, context: dict[str, Any], page: nodes.document | None
) -> None:
    """Describe a page in its head, for search engines."""
    subjects = {HOME: SUMMARY} | {one.name: f"{NAME}: {one.subject}" for one in pages()}
    if about := subjects.get(name):
        plain = escape(about.replace("`", ""))
        context["metatags"] += f'<meta name="description" content="{plain}">'


def setup(app: Sphinx) -> None:
    """Extend Sphinx."""
    logging.getLogger().setLevel(logging.WARNING)  # the theme's styles for code have set INFO
    app.connect("autodoc-process-docstring", in_restructured_text)
    app.connect("doctree-read", without_links_of_type)
    app.connect("doctree-read", with_dark_pictures, priority=400)  # before they are copied
    app.connect("html-page-context", with_description)
    app.connect("html-collect-pages", with_subjects)
