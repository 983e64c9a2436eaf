"""The pages as Sphinx reads them: copied from their two folders, with links between them changed.

A page links to another one by its path in the repository, so that both work where the repository
is read.
"""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from .navigation import HOME, ROOT, SECTIONS, sources
from .pictures import dark_twin

_FENCED = re.compile(r"^(?P<fence>```+|~~~+).*?^(?P=fence)[ \t]*$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?P<before>!?\[[^]\[]*(?:\[[^]]*\][^]\[]*)*\]\()(?P<target>[^()\s]+)(?=\))")
_ATTRIBUTE = re.compile(r'(?P<before>\b(?:src|srcset|href)=")(?P<target>[^"\s]+)(?=")')
_OUTSIDE = re.compile(r"[a-z]+:|//|#")


class Broken(Exception):
    """Links that lead to nothing."""


def write(folder: Path, repository: str | None = None) -> None:
    """Write all pages that have a file, and what they show. Raises `Broken`.

    The navigation ends with a link to the repository, if its URL is given.
    """
    wrong: list[str] = []
    for source, name in sources().items():
        page = folder / f"{name}.md"
        page.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            page.write_text(_listing(source), "utf-8")
            continue
        text = (ROOT / source).read_text("utf-8")
        page.write_text(_moved(text, source, name, folder, wrong), "utf-8")
    if wrong:
        raise Broken("\n".join(wrong))
    with (folder / f"{HOME}.md").open("a", encoding="utf-8") as home:
        home.write(_contents(repository))


def links(text: str) -> Iterator[re.Match[str]]:
    """Yield the links and pictures of a page, in Markdown and HTML, outside of its code."""
    prose = _FENCED.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), text)
    prose = re.sub(r"`[^`\n]*`", lambda code: f"`{'x' * (len(code[0]) - 2)}`", prose)
    for pattern in (_LINK, _ATTRIBUTE):
        for found in pattern.finditer(prose):
            if not _OUTSIDE.match(found["target"]):
                yield found


def _moved(text: str, source: str, name: str, folder: Path, wrong: list[str]) -> str:
    """Return a page whose links lead to the places that pages and files have on the site."""
    known = sources()
    for link in sorted(links(text), key=lambda one: one.start("target"), reverse=True):
        if link["target"].startswith("<"):
            wrong.append(f"{source}: {link['target']} is no link in Markdown: write ./ before it")
            continue
        path, mark, anchor = link["target"].partition("#")
        there = os.path.normpath(os.path.join(os.path.dirname(source), path))
        place = os.path.dirname(name)
        if there in known:
            to = os.path.relpath(f"{known[there]}.md", place or ".")
        elif (ROOT / there).is_file() and not there.endswith(".md"):
            # Pictures and what is to be had: under a name without the template's delimiters.
            copied = Path("files", re.sub(r"[^\w./-]", "", there))
            (folder / copied).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / there, folder / copied)
            if (twin := dark_twin(ROOT / there)).is_file():
                shutil.copyfile(twin, dark_twin(folder / copied))
            to = os.path.relpath(copied, place or ".")
        else:
            wrong.append(f"{source}: {link['target']} is no page of the site, and no file")
            continue
        text = f"{text[: link.start('target')]}{to}{mark}{anchor}{text[link.end('target') :]}"
    return text


def _listing(folder: str) -> str:
    """Return a page that leads to those of a folder."""
    names = [Path(source).stem for source in sources() if source.startswith(f"{folder}/")]
    return "\n".join((f"# {Path(folder).name.title()}", "", "```{toctree}", "", *names, "```", ""))


def _contents(repository: str | None) -> str:
    """Return the navigation. Pages of a folder are below the page that lists it."""
    listing = {source for source in sources() if (ROOT / source).is_dir()}
    trees = []
    for section, pages in SECTIONS.items():
        names = [one.name for one in pages if os.path.dirname(one.source or "") not in listing]
        trees.append([section, *names])
    if repository:
        trees[-1].append(f"Repository <{repository}>")
    return "".join(
        "\n".join(("", "```{toctree}", ":hidden:", f":caption: {section}", "", *names, "```", ""))
        for section, *names in trees
    )
