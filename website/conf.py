"""The configuration of Sphinx. `build` calls it."""

import logging
import re
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

from website.navigation import NAME

project = NAME
html_title = NAME
author = ""
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_static_path: list[str] = []
templates_path: list[str] = []
html_copy_source = False
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


def setup(app: Sphinx) -> None:
    """Extend Sphinx."""
    logging.getLogger().setLevel(logging.WARNING)  # the theme's styles for code have set INFO
    app.connect("autodoc-process-docstring", in_restructured_text)
    app.connect("doctree-read", without_links_of_type)
