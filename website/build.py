"""Build the site: `python -m website.build [FOLDER]`, by default into `build/site`.

With `--repository URL` its navigation has a link to the repository.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from sphinx.cmd.build import build_main

from . import links, llms, reference, sources
from .navigation import RAW, ROOT, unlisted

SERVICE = "parcel-tracker"


def bake(folder: Path) -> Path:
    """Generate a service with every optional part; return the folder of its source."""
    answers = [
        f"{one}=yes" for one in json.loads((ROOT / RAW / ".features.json").read_text("utf-8"))
    ]
    (folder / "config.yaml").write_text(f"replay_dir: {folder / 'replay'}\n", "utf-8")
    subprocess.run(
        [
            *(sys.executable, "-m", "cookiecutter", str(ROOT), "--no-input"),
            *("--config-file", str(folder / "config.yaml"), "--output-dir", str(folder), *answers),
        ],
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return folder / SERVICE / "src"


def build(site: Path, repository: str | None = None) -> list[str]:
    """Build the site into a folder; return what is wrong with it."""
    if missing := unlisted():
        return [f"{page} is in no section of website/navigation.py" for page in missing]
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        pages = work / "pages"
        try:
            sources.write(pages, repository)
        except sources.Broken as error:
            return str(error).splitlines()
        if (site / "objects.inv").exists():  # an earlier site, whose deleted pages would stay
            shutil.rmtree(site)
        sys.path.insert(0, str(bake(work)))
        reference.write(pages)
        if not render(pages, site, work / "doctrees"):
            return ["Sphinx has warned: a warning is an error here"]
        llms.write(pages, site)
    return list(links.broken(site))


def render(pages: Path, site: Path, doctrees: Path) -> bool:
    """Let Sphinx make HTML of pages; return whether it did so without a warning."""
    options = ["-b", "html", "-q", "-E", "-a", "-W", "--keep-going"]
    places = ["-c", str(ROOT / "website"), "-d", str(doctrees), str(pages), str(site)]
    return build_main([*options, *places]) == 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "site")
    parser.add_argument("--repository", help="URL of the repository, to which the pages link")
    given = parser.parse_args()
    if wrong := build(given.folder.resolve(), given.repository):
        sys.exit("\n".join(wrong))
    print(f"The site is in {given.folder}")
