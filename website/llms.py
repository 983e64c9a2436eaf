"""The site for language models: `llms.txt` lists its pages, each of which is there as Markdown."""

import shutil
from pathlib import Path

from .navigation import HOME, NAME, SECTIONS, SUMMARY, title


def write(pages: Path, site: Path) -> None:
    """Write `llms.txt`, in the form of llmstxt.org, and the Markdown of every page."""
    lines = [f"# {NAME}", "", f"> {SUMMARY}", "", f"Overview: [{HOME}.md]({HOME}.md)"]
    for section, listed in SECTIONS.items():
        lines += ["", f"## {section}", ""]
        for page in listed:
            heading = title((pages / f"{page.name}.md").read_text("utf-8"))
            about = "" if page.subject == heading else f": {page.subject}"
            lines.append(f"- [{heading}]({page.name}.md){about}")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", "utf-8")
    for name in (HOME, *(page.name for listed in SECTIONS.values() for page in listed)):
        shutil.copyfile(pages / f"{name}.md", site / f"{name}.md")
