"""Merge another version of the template, or other answers, into this service: `make update`.

Cookiecutter bakes the requested version. The bake is committed to the branch `template`, which has
only such commits, and git merges that branch into the current one. The base of the merge is the
version of the template that the service has; it is baked, too, if the branch does not have it.
docs/updating.md describes the use.

Run it in the folder of the service, with a Python that has cookiecutter.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine import CHECKSUMS, differences
from renaming import NAMES, Renames, modules_in

RECORD = ".cookiecutter.json"
QUESTIONS = "cookiecutter.json"
CHANGELOG = "CHANGELOG.md"
RELEASES = "releases.json"
"""Versions and commits of the template's releases: tags do not travel with every clone."""
MARK = "Template-Tree"
"""The trailer of a bake's commit: its tree. A commit with another tree is not a bake."""

UNFINISHED = {
    "MERGE_HEAD": "merge",
    "rebase-merge": "rebase",
    "rebase-apply": "rebase or `git am`",
    "CHERRY_PICK_HEAD": "cherry-pick",
    "REVERT_HEAD": "revert",
    "sequencer": "cherry-pick or revert",
    "BISECT_LOG": "bisection",
}
"""Files in git's folder during an operation, with its name."""

OF_A_REPOSITORY = {
    *("GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_COMMON_DIR", "GIT_DIR", "GIT_GRAFT_FILE"),
    *("GIT_IMPLICIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_NAMESPACE", "GIT_OBJECT_DIRECTORY"),
    *("GIT_PREFIX", "GIT_SHALLOW_FILE", "GIT_WORK_TREE"),
}
"""Variables that hooks and aliases of git set, which may name another repository."""


class Refused(Exception):
    """The update is not possible, and nothing was changed; the message says why and what to do."""


class GitFailed(Refused):
    """Git has failed; the message is git's."""


def environment_here() -> dict[str, str]:
    """Return the environment without variables that name another repository."""
    return {name: value for name, value in os.environ.items() if name not in OF_A_REPOSITORY}


def git(*arguments: str | Path, cwd: Path, given: str = "", **environment: str) -> str:
    """Run git with `given` as its input, and return its output; raise `GitFailed` if it fails."""
    done = subprocess.run(
        ["git", *arguments],
        cwd=cwd,
        env={**environment_here(), **environment},
        input=given,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode != 0:
        raise GitFailed((done.stderr or done.stdout).strip())
    return done.stdout.strip()


def contents(objects: list[str], cwd: Path) -> list[bytes]:
    """Return the contents of objects of a repository."""
    given = "".join(f"{one}\n" for one in objects).encode("ascii")
    said = _pipe("cat-file", "--batch", cwd=cwd, given=given)
    found: list[bytes] = []
    place = 0
    for _ in objects:
        begin = said.index(b"\n", place) + 1
        end = begin + int(said[place:begin].split()[2])
        found.append(said[begin:end])
        place = end + 1  # behind a line feed
    return found


def stored(content: bytes, cwd: Path) -> str:
    """Store the content of a file in a repository, and return the name of the object."""
    return _pipe("hash-object", "-w", "--stdin", cwd=cwd, given=content).decode("ascii").strip()


def _pipe(*arguments: str, cwd: Path, given: bytes) -> bytes:
    command = ["git", *arguments]
    environment = environment_here()
    return subprocess.run(
        command, cwd=cwd, env=environment, input=given, stdout=subprocess.PIPE, check=True
    ).stdout


def succeeds(*arguments: str, cwd: Path) -> bool:
    """Return whether git runs without an error."""
    try:
        git(*arguments, cwd=cwd)
    except GitFailed:
        return False
    return True


def without_password(location: str) -> str:
    """Return a location without its password; one of HTTP also without its user."""
    # Also matches an unescaped slash in a password, where the text after the colon is not a port.
    user = r"[^/?#]*@|[^/?#@:\[]*:(?!\d*([/?#]|$)).*@"
    kept = re.sub(rf"(?i)(?<=\bhttp://)({user})|(?<=\bhttps://)({user})", "", location, count=1)
    return re.sub(r"(?<=://)[^/@]*:[^/]*@", "", kept, count=1)


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, the major one first."""
    return tuple(int(number) for number in re.findall(r"\d+", version))


@dataclass(frozen=True)
class Service:
    """The service in its repository."""

    root: Path
    prefix: str
    """Its folder in the repository, ending with a slash; empty for the repository's root."""
    record: dict[str, Any]

    @classmethod
    def found(cls, root: Path) -> Service:
        """Return the service in a folder; raise `Refused` if a merge can't begin there."""
        try:
            prefix = git("rev-parse", "--show-prefix", cwd=root)
        except FileNotFoundError:
            raise Refused("git is not installed: install it, the update is a merge") from None
        except GitFailed as error:
            raise Refused(f"{error}: commit the service to a git repository first") from None
        if not (root / RECORD).exists():
            raise Refused(f"no {RECORD} here: run this in the folder of the service")
        if not succeeds("cat-file", "-e", f"HEAD:{prefix}{RECORD}", cwd=root):
            raise Refused(f"{RECORD} is not committed: commit the service first")
        if not succeeds("var", "GIT_COMMITTER_IDENT", cwd=root):
            raise Refused("git has no identity for a commit: set user.name and user.email")
        service = cls(root, prefix, json.loads((root / RECORD).read_text("utf-8")))
        service.check_state()
        return service

    def check_state(self) -> None:
        """Raise `Refused` during another git operation, with uncommitted changes, or if detached.

        It is also raised if git rejects the name of the branch of bakes, and on that branch.
        """
        for name, what in UNFINISHED.items():
            if (self.root / self.git("rev-parse", "--git-path", name)).exists():
                raise Refused(f"a {what} is not finished: finish it first, or abort it")
        if self.git("status", "--porcelain", "--untracked-files=no"):
            raise Refused("there are uncommitted changes: commit or stash them first")
        if not succeeds("check-ref-format", f"refs/heads/{self.branch}", cwd=self.root):
            raise Refused(
                f"git accepts no branch {self.branch!r}, the name of the branch of bakes, which is"
                " derived from that of the folder: rename the folder"
            )
        if not succeeds("symbolic-ref", "--quiet", "HEAD", cwd=self.root):
            raise Refused("HEAD is detached: check out the branch that the update is for")
        if self.git("symbolic-ref", "HEAD") == f"refs/heads/{self.branch}":
            raise Refused(f"check out your own branch: {self.branch} has only bakes")

    @property
    def branch(self) -> str:
        """The name of the branch of bakes; one of its own for each service of a repository."""
        return "-".join(["template", *filter(None, self.prefix.split("/"))])

    def git(self, *arguments: str, **environment: str) -> str:
        """Run git in the folder of the service."""
        return git(*arguments, cwd=self.root, **environment)

    def blob(self, commit: str) -> str | None:
        """Return the id of the record in a commit; None without one."""
        name = f"{commit}:{self.prefix}{RECORD}"
        return (
            self.git("rev-parse", name) if succeeds("cat-file", "-e", name, cwd=self.root) else None
        )

    def settings(self, commit: str) -> set[str]:
        """Return the settings that the files in deploy/ of a commit name, as those they need."""
        folder = f"{commit}:{self.prefix}deploy"
        try:
            plain = "--no-line-number", "--no-column", "--no-color"
            found = self.git("grep", *plain, "-E", "-o", "-h", "PIPELINE_[A-Z_]*[A-Z]", folder)
        except GitFailed:  # there is none
            return set()
        return set(found.split())

    def bakes(self) -> tuple[str | None, str | None]:
        """Return the branch's newest commit, and that of the bake that HEAD has.

        Branches of remotes are used as well, for a clone without a local branch. After an update
        was reverted, the bake that HEAD has is committed once more, as the newest.
        """
        patterns = (f"refs/heads/{self.branch}", f"refs/remotes/*/{self.branch}")
        tips = self.git("for-each-ref", "--format=%(objectname)", *patterns).split()
        for tip in tips:
            self.check_bakes(tip)
            for commit in self.git("rev-list", tip).split():
                if self.blob(commit) == self.blob("HEAD"):
                    return self.recommit_if_reverted(tip, commit)
        return (tips[0] if tips else None), None

    def check_bakes(self, tip: str) -> None:
        """Raise `Refused` if the branch has a commit that is not a bake."""
        bakes: list[str] = []
        others: list[str] = []
        for entry in self.git("rev-list", "--format=%T %P%n%B%x1e", tip).split("\x1e"):
            name, trees, *message = entry.strip().splitlines()
            tree, *parents = trees.split()
            is_bake = f"{MARK}: {tree}" in message and len(parents) < 2
            (bakes if is_bake else others).append(name.split()[1][:10])
        if not bakes:
            raise Refused(
                f"the branch {self.branch} is not the branch of bakes, because it has none: rename"
                " it"
            )
        if others:
            raise Refused(
                f"the branch {self.branch} must have bakes only, and {others[0]} is not one:"
                f" `git branch --force {self.branch} {bakes[0]}` returns to the newest bake"
            )

    def recommit_if_reverted(self, tip: str, bake: str) -> tuple[str, str]:
        """Return the branch's newest commit and the base of the merge, for the bake of HEAD.

        If the merge of a newer bake was reverted, git would use the newer one as the base and
        consider its changes merged. The older bake is then committed again, as the newest.
        """
        if succeeds("merge-base", tip, "HEAD", cwd=self.root):
            merged = self.git("merge-base", tip, "HEAD")
            if merged != bake and succeeds(
                "merge-base", "--is-ancestor", bake, merged, cwd=self.root
            ):
                title = self.git("show", "--no-patch", "--no-show-signature", "--format=%s", bake)
                again = self.commit_tree(self.git("rev-parse", f"{bake}^{{tree}}"), tip, title)
                return again, again
        return tip, bake

    def commit_tree(self, tree: str, parent: str | None, message: str) -> str:
        """Commit the tree of a bake as a child of `parent`, with the trailer of a bake."""
        parents = ("-p", parent) if parent else ()
        mark = f"{MARK}: {tree}"
        return self.git("commit-tree", tree, *parents, "-m", message, "-m", mark)

    def commit(self, bake: Path, parent: str | None, message: str) -> str:
        """Commit a bake as a child of `parent`; index and working tree are not changed.

        Files are ignored by the bake's own `.gitignore` only, not by the user's settings.
        """
        index = {"GIT_INDEX_FILE": f"{bake}.index"}
        place = (f"--git-dir={self.git('rev-parse', '--absolute-git-dir')}", f"--work-tree={bake}")
        own = ("ls-files", "--others", "--exclude-per-directory=.gitignore", "-z")
        files = git(*place, *own, cwd=bake, **index)
        git(*place, "update-index", "--add", "-z", "--stdin", cwd=bake, given=files, **index)
        tree = self.git("write-tree", **index)
        if self.prefix:
            index = {"GIT_INDEX_FILE": f"{bake}.prefixed"}
            self.git("read-tree", f"--prefix={self.prefix}", tree, **index)
            tree = self.git("write-tree", **index)
        if parent and tree == self.git("rev-parse", f"{parent}^{{tree}}"):
            return parent
        return self.commit_tree(tree, parent, message)

    def renamed(self, commit: str, renames: Renames, folder: Path) -> str:
        """Return the tree of a commit in which packages have their new names.

        It lacks the record, so that nothing takes it for the bake of a version. Raises `Refused`
        if a file has the new path of another one.
        """
        listed = self.git("ls-tree", "-r", "-z", "--full-tree", commit).split("\0")
        entries = (entry.partition("\t") for entry in listed if entry)
        found = {
            name.removeprefix(self.prefix): what.split()
            for what, _, name in entries
            if name.startswith(self.prefix)
        }
        files = {path: what for path, what in found.items() if what[1] == "blob"}
        texts = contents([name for _, _, name in files.values()], self.root)
        changes = [f"0 {files[RECORD][2]}\t{self.prefix}{RECORD}"]
        for (path, (mode, _, name)), before in zip(files.items(), texts, strict=True):
            new_path = renames.path(path)
            after = renames.content(path, before) if mode.startswith("100") else before
            if new_path != path and new_path in found:
                raise Refused(f"{new_path} will be the path of {path}: move your file first")
            if path != RECORD and (new_path, after) != (path, before):
                new_name = stored(after, self.root) if after != before else name
                changes.append(f"0 {name}\t{self.prefix}{path}")
                changes.append(f"{mode} {new_name}\t{self.prefix}{new_path}")
        index = {"GIT_INDEX_FILE": str(folder / "renamed.index")}
        self.git("read-tree", commit, **index)
        given = "".join(f"{one}\0" for one in changes)
        self.git("update-index", "-z", "--index-info", given=given, **index)
        return self.git("write-tree", **index)

    def link(self, base: str, name: str) -> None:
        """Make a bake an ancestor of HEAD without changing files."""
        parents = ("-p", "HEAD", "-p", base)
        message = f"This service came from {name} of the template"
        linked = self.git("commit-tree", "HEAD^{tree}", *parents, "-m", message)
        self.git("update-ref", "-m", message, "HEAD", linked)

    def check_untracked(self, base: str, bake: str) -> None:
        """Raise `Refused` if a merge would overwrite files that are not in git.

        Git itself overwrites ignored files.
        """
        tracked = [Path(name) for name in self.git("ls-files", "-z").split("\0")]
        in_git = {*tracked, *(folder for path in tracked for folder in path.parents)}
        written = ("--no-renames", "--name-only", "--diff-filter=d", "--relative", "-z")
        found: set[Path] = set()
        for name in filter(None, self.git("diff", *written, base, bake).split("\0")):
            path = Path(name)
            found.update(folder for folder in path.parents if self.is_file(folder))
            if os.path.lexists(self.root / path):
                found.add(path)
        found -= in_git
        if found:
            names = ", ".join(sorted(path.as_posix() for path in found))
            raise Refused(
                f"the merge would overwrite files that are not in git: {names}: commit, move or"
                " delete them first"
            )

    def is_file(self, path: Path) -> bool:
        """Return whether the path exists and is not a folder."""
        whole = self.root / path
        return os.path.lexists(whole) and (whole.is_symlink() or not whole.is_dir())


@dataclass(frozen=True)
class Template:
    """A clone of the template's repository, in a temporary folder."""

    location: str
    """URL or path of the repository, without a password."""
    folder: Path

    @classmethod
    def cloned(cls, location: str, folder: Path) -> Template:
        """Clone the repository; raise `Refused` if that fails."""
        try:
            git("clone", "--quiet", "--no-checkout", "--", location, folder / "clone", cwd=folder)
        except GitFailed as error:
            failure = str(error).replace(location, without_password(location))
            raise Refused(
                f"{failure}\nThe template can't be cloned; set another location with"
                " TEMPLATE=<URL or path>"
            ) from None
        return cls(without_password(location), folder)

    def git(self, *arguments: str) -> str:
        """Run git in the clone."""
        return git(*arguments, cwd=self.folder / "clone")

    def has(self, name: str) -> bool:
        """Return whether the clone has a commit of this name."""
        clone = self.folder / "clone"
        return succeeds("rev-parse", "--quiet", "--verify", f"{name}^{{commit}}", cwd=clone)

    def find(self, version: str | None) -> str | None:
        """Return the commit of a release, tag, branch or commit; None if there is none."""
        if not version:
            return None
        tag = f"v{version.removeprefix('v')}"
        for name in (self.releases.get(tag, version), version, tag, f"origin/{version}"):
            if self.has(name):
                return self.git("rev-parse", f"{name}^{{commit}}")
        return None

    def commit(self, version: str) -> str:
        """Return the commit of a tag, branch or commit; raise `Refused` if there is none."""
        found = self.find(version)
        if found is None:
            raise Refused(
                f"{self.location} has no version {version}: name a release, tag, branch or commit"
            )
        return found

    @cached_property
    def listed(self) -> dict[str, str]:
        """The releases, the newest first, and the commit or tag of each.

        They are those that the newest commit lists, and those with a tag.
        """
        found = {tag: tag for tag in self.git("tag", "--list", "v[0-9]*").split()}
        if succeeds("cat-file", "-e", f"HEAD:{RELEASES}", cwd=self.folder / "clone"):
            listed = json.loads(self.git("show", f"HEAD:{RELEASES}"))
            found |= {f"v{one['version']}": one["commit"] for one in listed}
        names = filter(re.compile(r"v\d+(\.\d+)*").fullmatch, found)
        return {name: found[name] for name in sorted(names, key=numbers, reverse=True)}

    @cached_property
    def releases(self) -> dict[str, str]:
        """Those of the releases whose commits are there: a shallow or squashed copy lacks some."""
        return {name: commit for name, commit in self.listed.items() if self.has(commit)}

    def newest(self) -> str:
        """Return the newest release; without releases, HEAD of the clone."""
        return next(iter(self.releases), "HEAD")

    def version(self, commit: str) -> str:
        """Return the version of a commit."""
        questions = json.loads(self.git("show", f"{commit}:{QUESTIONS}"))
        return str(questions.get("_template_version", "?"))

    def name(self, commit: str) -> str:
        """Return version and commit as text."""
        return f"version {self.version(commit)} ({commit[:10]})"

    def check_step(self, old: str, new: str) -> None:
        """Raise `Refused` if the last version before a new major version is skipped."""
        major = numbers(self.version(new))[:1]
        last = next((tag for tag in self.listed if numbers(tag)[:1] < major), None)
        if last and numbers(self.version(old)) < numbers(last):
            raise Refused(
                f"{self.name(new)} may drop columns that versions before {last} use: update to"
                f" {last} first, and deploy it (TO={last})"
            )

    def bake(self, commit: str, answers: dict[str, str]) -> Path:
        """Return the folder of a service of this version with these answers."""
        self.git("checkout", "--quiet", "--detach", commit)
        output = self.folder / commit
        config = self.folder / "config.yaml"
        folders = {"cookiecutters_dir": str(self.folder), "replay_dir": str(self.folder / "replay")}
        config.write_text(json.dumps(folders), "utf-8")
        questions = json.loads((self.folder / "clone" / QUESTIONS).read_text("utf-8"))
        given = [f"{name}={answer}" for name, answer in answers.items() if name in questions]
        # Bytecode is matched by the source's time in seconds, and two checkouts may have the same.
        environment = {**environment_here(), "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(
            [
                *(sys.executable, "-m", "cookiecutter", str(self.folder / "clone"), "--no-input"),
                *("--config-file", str(config), "--output-dir", str(output), *given),
            ],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode != 0:
            raise Refused(f"{done.stdout.strip()}\n{self.name(commit)} can't be baked")
        for line in dict.fromkeys(done.stdout.splitlines()):
            if line.startswith("warning: "):
                print(line)
        (baked,) = output.iterdir()
        return baked


def update(root: Path, options: Namespace) -> bool:
    """Bake, commit and merge; return whether there is no conflict, or raise `Refused`."""
    if find_spec("cookiecutter") is None:
        raise Refused("cookiecutter is not installed in this Python: run `make update`")
    service = Service.found(root)
    location = options.template or service.record.get("template")
    if not location:
        raise Refused(f"{RECORD} has no location of the template: add TEMPLATE=<URL or path>")
    if Path(location).exists():
        location = os.path.abspath(location)
    build = root / "build"
    build.mkdir(exist_ok=True)
    with TemporaryDirectory(prefix="update-", dir=build) as folder:
        return _update(service, Template.cloned(location, Path(folder)), options)


def _update(service: Service, template: Template, options: Namespace) -> bool:
    recorded = service.record.get("commit")
    old = template.commit(options.origin) if options.origin else template.find(recorded)
    new = _wanted(template, old, options)
    if old:
        template.check_step(old, new)
    tip, base = service.bakes()
    answers = dict(service.record["cookiecutter"])
    if base is None or options.origin:
        if old is None:
            raise Refused(
                f"{RECORD} names no commit of {template.location}: add FROM=<tag or commit> of the"
                " version that the service was generated from, or of one of about that time"
            )
        baked = template.bake(old, answers)
        (baked / RECORD).write_bytes((service.root / RECORD).read_bytes())
        tip = base = service.commit(baked, tip, f"Template {template.name(old)}")
    chosen = _chosen(template, new, answers, options.answers)
    baked = template.bake(new, chosen)
    record = json.loads((baked / RECORD).read_text("utf-8"))
    record = {**record, "template": template.location, "commit": new}
    order = ("template", "commit", "template_version", "cookiecutter")
    record = {name: record[name] for name in (*order, *record) if name in record}
    (baked / RECORD).write_text(json.dumps(record, indent=4, ensure_ascii=False) + "\n", "utf-8")
    title = " ".join([f"Template {template.name(new)}", *options.answers])
    engine, renames = unedited_engine(service), _renames(service, template, base)
    if renames:
        tree = service.renamed(base, renames, template.folder)
        tip = service.commit_tree(tree, tip, f"Names of {template.name(new)}")
    merged = service.commit(baked, tip, title)
    service.check_untracked(base, merged)
    head = service.git("rev-parse", "HEAD")
    if not succeeds("merge-base", "--is-ancestor", base, "HEAD", cwd=service.root):
        service.link(base, template.name(old) if old else "an unknown version")
    before = service.git("rev-parse", "HEAD")
    try:
        if renames:
            # The merge compares files under their new names: HEAD has them until it has begun.
            tree = service.renamed(before, renames, template.folder)
            parents = ("-p", before, "-p", str(tip))
            own = service.git("commit-tree", tree, *parents, "-m", f"Names: {title}")
            service.git("reset", "--quiet", "--keep", own)
            engine = renames.text(CHECKSUMS, engine)
        is_begun = begin(service, merged, f"Merge: {title}", engine)
    except Refused:
        service.git("reset", "--quiet", "--keep", head)
        raise
    service.git("update-ref", "-m", f"Merge: {title}", "HEAD", before)
    service.git("update-ref", f"refs/heads/{service.branch}", merged)
    conflicts = finish(service, f"Merge: {title}") if is_begun else []
    _report_answers(record["cookiecutter"], chosen)
    _report_changes(template, old, new)
    changed = service.git("diff", "--name-only", "--relative", base, merged).splitlines()
    if old and not (baked / CHECKSUMS).exists():  # the engine's migrations are in its distribution
        of_engine = ":(glob)*/src/**/migrations/**"
        changed += template.git("diff", "--name-only", old, new, "--", of_engine).splitlines()
    settings = service.settings(merged) - service.settings(base)
    _report_steps(changed, conflicts, settings, is_renamed=bool(renames))
    return not conflicts


def _renames(service: Service, template: Template, base: str) -> Renames | None:
    """Return new names of packages in the version that was baked last; None if there are none.

    They are those of the template's source, which a service with `engine=package` lacks.
    """
    found = [*(template.folder / "clone").glob(f"*/{NAMES}")]
    if not found:
        return None
    names: dict[str, str] = json.loads(found[0].read_text("utf-8"))
    names.pop(service.record["cookiecutter"].get("package_name"), None)
    paths = service.git("ls-tree", "-r", "-z", "--name-only", base).split("\0")
    modules = modules_in(paths, names, moved=False)
    if not modules:
        return None
    return Renames(
        modules, paths, lambda path: service.git("show", f"{base}:{service.prefix}{path}")
    )


def _wanted(template: Template, old: str | None, options: Namespace) -> str:
    """Return the commit to bake."""
    if options.to:
        return template.commit(options.to)
    if options.answers:
        if old is None:
            raise Refused(f"{RECORD} names no commit of {template.location}: add TO=<version>")
        return old
    new = template.commit(template.newest())
    is_newer = (
        old
        and old != new
        and succeeds("merge-base", "--is-ancestor", new, old, cwd=template.folder / "clone")
    )
    if old and is_newer:
        raise Refused(
            f"the service has {template.name(old)} of the template, which is newer than the newest"
            f" release, {template.name(new)}: choose another with TO=<version>"
        )
    return new


def _chosen(
    template: Template, commit: str, answers: dict[str, str], changes: list[str]
) -> dict[str, str]:
    """Return the recorded answers with the changes."""
    questions = json.loads(template.git("show", f"{commit}:{QUESTIONS}"))
    for change in changes:
        name, _, answer = change.partition("=")
        if name not in questions or name.startswith("_"):
            raise Refused(
                f"{change}: the template has no question {name}; its questions are "
                + ", ".join(one for one in questions if not one.startswith("_"))
            )
        answers[name] = answer
    return answers


def unedited_engine(service: Service) -> str:
    """Return the checksums of the engine; an empty text if the service has edited a file."""
    checksums = service.root / CHECKSUMS
    is_unedited = checksums.exists() and not differences(service.root)
    return checksums.read_text("utf-8") if is_unedited else ""


def begin(service: Service, bake: str, message: str, engine: str) -> bool:
    """Merge a bake into index and working tree; return whether there was anything to merge.

    `engine` has the checksums of an engine that is replaced. Raises `Refused` if git did not begin
    the merge.
    """
    try:
        service.git("merge", "--no-ff", "--no-commit", "-m", message, bake)
    except GitFailed as error:
        failure = str(error)
    else:
        failure = ""
    if not succeeds("rev-parse", "--quiet", "--verify", "MERGE_HEAD", cwd=service.root):
        if failure:
            raise Refused(f"{failure}\nNothing was merged")
        print("Nothing to merge: the service has this version already.")
        return False
    if engine:
        take_engine(service, engine, bake)
    return True


def finish(service: Service, message: str) -> list[str]:
    """Commit the merge; return the files with conflicts instead, if there are any."""
    unmerged = service.git("diff", "--name-only", "--relative", "--diff-filter=U").splitlines()
    if unmerged:
        return unmerged
    try:
        service.git("commit", "--quiet", "--no-edit")
    except GitFailed as error:
        raise Refused(f"{error}\nThe merge is staged, without conflicts: commit it") from None
    print(f"Committed. {message}")
    return []


def take_engine(service: Service, checksums: str, bake: str) -> None:
    """Replace an engine that the service has not edited with that of a bake.

    What the service has in folders that are new in the engine is its own: they stay merged.
    """
    file = f"{bake}:{service.prefix}{CHECKSUMS}"
    is_source = succeeds("cat-file", "-e", file, cwd=service.root)
    new_checksums = service.git("show", file) if is_source else ""  # a package has none
    before, after = (
        set(re.findall(r"(?m)^\S+  ([^/\n]+/[^/\n]+)/", text))
        for text in (checksums, new_checksums)
    )
    for folder in after - before:
        if succeeds("cat-file", "-e", f"HEAD:{service.prefix}{folder}", cwd=service.root):
            after.remove(folder)
    if succeeds("diff", "--quiet", "--cached", bake, "--", *before, *after, cwd=service.root):
        return
    kept = [f":(exclude,glob){folder}/**/.*" for folder in before]  # not in the checksums
    service.git("rm", "-r", "-f", "--quiet", "--ignore-unmatch", "--", *before, *kept)
    if is_source:
        service.git("checkout", "--quiet", bake, "--", *after, CHECKSUMS)


def _report_answers(recorded: dict[str, str], chosen: dict[str, str]) -> None:
    for name in recorded.keys() - chosen.keys():
        print(
            f"New question {name}: answered {recorded[name]!r}, the default; change it by ANSWERS=…"
        )
    for name in chosen.keys() - recorded.keys():
        print(f"The question {name} was removed, with its answer {chosen[name]!r}.")


def _report_changes(template: Template, old: str | None, new: str) -> None:
    if old is None:
        print(f"The previous version is not known; see the changes in the template's {CHANGELOG}.")
        return
    if old == new:
        return
    added = template.git("diff", "--unified=0", old, new, "--", CHANGELOG).splitlines()
    lines = [line[1:] for line in added if re.match(r"\+(?!\+\+ )", line)]
    print(f"\nFrom {template.name(old)} to {template.name(new)}, new in {CHANGELOG}:\n")
    print("\n".join(lines) or "(nothing)")


def _report_steps(
    changed: list[str], conflicts: list[str], settings: set[str], *, is_renamed: bool
) -> None:
    print("\nWhat to do next:\n")
    if conflicts:
        print("- Resolve the conflicts, `git add` the files, and `git commit`:")
        print("\n".join(f"    {name}" for name in conflicts))
        print("  `git merge --abort` returns to the state before.")
        pins = [name for name in conflicts if re.fullmatch(r"requirements/.*\.txt", name)]
        if pins:
            print(f"- `git checkout --theirs {' '.join(pins)}`, then `make requirements`.")
    if any(re.search(r"(^|/)requirements/", name) for name in changed):
        print("- Requirements changed: `make setup`; build the image again.")
    if any(re.search(r"(^|/)migrations/", name) for name in changed):
        print("- Migrations changed: `service migrate` before the new code starts.")
    if settings:
        print(f"- New in deploy/, set where the service runs: {', '.join(sorted(settings))}.")
    if any(name.startswith("deploy/") for name in changed):
        print("- deploy/ changed: apply the manifests, roles and alerts that you use.")
    if is_renamed:
        print("- Packages have new names, also in your files: `make format` sorts the imports.")
    print("- `make check test`")


def main(arguments: list[str]) -> int:
    """Return 0 if everything is merged; 1 with conflicts, or if the update was rejected."""
    parser = ArgumentParser(description="Merge another version of the template into this service.")
    parser.add_argument("--to", help="tag, branch or commit; otherwise the newest release")
    parser.add_argument(
        "--from", dest="origin", help="tag or commit that the service has, if not recorded"
    )
    parser.add_argument("--template", help="URL or path of the template, if not the recorded one")
    parser.add_argument("answers", nargs="*", metavar="question=answer", help="changed answers")
    try:
        return 0 if update(Path.cwd(), parser.parse_args(arguments)) else 1
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
