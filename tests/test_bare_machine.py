"""The first commands of the README, word by word, where there is what it asks for and no more.

This is the distribution of this machine, Debian or Ubuntu, made anew. The user is root, so `make`
installs Java and Maven. All processes and mounts end with their namespaces.
"""

import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.baked import RAW, ROOT
from tests.programs import lacking, require
from tests.test_guides import for_a_shell

pytestmark = [pytest.mark.full, pytest.mark.timeout(3_600)]  # with all that it installs

PACKAGES = "ca-certificates,git,make,python3-venv"
"""What the README asks for. With apt-get, git would bring the certificates."""

REACHING = (
    "etc/hosts",
    "etc/pip.conf",
    "etc/resolv.conf",
    "root/.m2/settings.xml",
    "usr/local/share/ca-certificates",
)
"""What this machine may have in order to reach package indexes."""

NAMESPACE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-euc")
ENTER = """
mount -t proc proc "$0/proc"
mount --rbind /dev "$0/dev"
exec chroot "$0" env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin bash -euc "$1"
"""

FOLLOW = """
mkdir /srv/work
cd /srv/work
({generating}) > run.log 2>&1 &
until grep -q 'ready, after' run.log; do
    kill -0 $!
    sleep 1
done
cd parcel-tracker
{sending}
make test
"""


def mirror() -> tuple[str, list[str]]:
    """Return the distribution's components, and its release and mirror, if that has a URL."""
    targets = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(COMPONENT)"]
    release = platform.freedesktop_os_release()["VERSION_CODENAME"]
    wanted = ["Identifier: Packages", f"Release: {release}"]
    said = subprocess.run([*targets, *wanted], capture_output=True, text=True, check=True).stdout
    found = [line.split() for line in said.splitlines()]
    (place, *_) = [place for place, component in found if component == "main"]
    components = ",".join(sorted({component for one, component in found if one == place}))
    return components, [release, *([place] if place.startswith("http") else [])]


@pytest.fixture
def root() -> Iterator[Path]:
    """The root of a bare system, with a clone of this repository."""
    debootstrap = require("debootstrap")
    if os.geteuid() != 0:
        lacking("only root can make a bare system")
    components, (release, *place) = mirror()
    with tempfile.TemporaryDirectory(prefix="bare-") as folder:
        new = Path(folder, "root")
        options = ["--variant=minbase", f"--include={PACKAGES}", f"--components={components}"]
        make = [str(debootstrap), *options, release, str(new), *place]
        done = subprocess.run([*NAMESPACE, 'exec "$0" "$@"', *make], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2_000:] + done.stderr
        for path in REACHING:
            source, target = Path("/", path), new / path
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True)
            elif source.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.unlink(missing_ok=True)  # it may be a link, in either place
                shutil.copy(source, target)
        clone = ["git", "clone", "--quiet", ROOT.as_uri(), str(new / "srv" / "onceward")]
        subprocess.run(clone, check=True)
        run(new, "update-ca-certificates")
        yield new


def run(root: Path, script: str) -> str:
    """Run a script on the bare system and return what it said; fail if the script does."""
    done = subprocess.run(
        [*NAMESPACE, ENTER, str(root), script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    log = root / "srv" / "work" / "run.log"
    background = log.read_text("utf-8")[-5_000:] if log.exists() else ""
    assert done.returncode == 0, f"{done.stdout[-5_000:]}\n{background}"
    return done.stdout


def test_a_service_is_generated_runs_and_is_tested_as_the_read_mes_say(root: Path) -> None:
    (generating,) = for_a_shell((ROOT / "README.md").read_text("utf-8"))
    blocks = for_a_shell((RAW / "README.md").read_text("utf-8"))
    (sending,) = (one for one in blocks if "--watch parcel-events" in one)

    said = run(root, FOLLOW.format(generating=generating, sending=sending))

    assert "published parcel.moved.v1" in said
    assert re.search(r"\d+ passed", said)
    assert not re.search(r"\d+ (skipped|xfailed)", said)
