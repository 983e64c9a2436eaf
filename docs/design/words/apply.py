"""Replace words that plain technical English does not have, in the working tree of a clone.

    python docs/design/words/apply.py [CLONE]

Standard library only. Tables of this folder: `sentences.json` (file or "*", old text, new text),
`names.json` (old and new identifier, and where), `long_tests.txt` (old and new name of a test). What
does not match is printed and skipped. Run ruff's formatter afterwards.
"""

import json
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from io import StringIO
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else HERE.parents[2]).resolve()
WIDTH = 100
SUFFIXES = {".py", ".md", ".html", ".yaml", ".yml", ".json", ".toml", ".txt", ".sql", ".jinja"}
LEFT = re.compile(
    r"(^|/)(\.git|\.venv|build|node_modules|requirements|releases|otelcol|decisions|design)/"
    r"|^CHANGELOG\.md$|(^|/)(language\.py|instructions\.json|releases\.json|imports\.txt)$"
    r"|/docs/performance/|/migrations/\d"
)
"""Files that stay as they are: of releases, recorded, or about the words."""

Rule = tuple[re.Pattern[str], "str | Callable[[re.Match[str]], str]"]


def _article(found: re.Match[str]) -> str:
    verb, noun, s = found["verb"], found["noun"], found["s"]
    if noun.lower() in {"json", "text", "bytes", "data", "lag", "news", "progress"}:
        return f"{verb}{s}not{s}{noun}"
    vowel = noun[0].lower() in "aeiou" and not noun.lower().startswith(("use", "uni", "one"))
    return f"{verb}{s}not{s}{'an' if vowel or noun[:2] == 'HT' else 'a'}{s}{noun}"


def _rule(pattern: str, new: "str | Callable[[re.Match[str]], str]") -> Rule:
    return re.compile(rf"(?<![^\W_])(?:{pattern})(?![^\W_])"), new


_NOT = r"(?<!there )(?<!there_)"
RULES: list[Rule] = [
    _rule(r"an?([ _])((?:new|second|separate)\1)?([A-Za-z]+)\1of\1(its|their|one's)\1own", r"\4\1own\1\3"),
    _rule(
        r"(have|has|had|with|without|needs?|are|by)([ _])([A-Za-z]+s)\2of\2(its|their|one's)\2own",
        r"\1\2\4\2own\2\3",
    ),
    _rule(
        rf"{_NOT}(?P<verb>is|was|are|were)(?P<s>[ _])no(?P=s)"
        r"(?!longer|more|less|slower|faster|one|other|better|worse|matter)(?P<noun>[A-Za-z]+)",
        lambda found: (
            f"{found['verb']}{found['s']}not{found['s']}{found['noun']}"
            if found["verb"] in {"are", "were"}
            else _article(found)
        ),
    ),
    _rule(r"died([ _])over", r"crashed\1while\1handling"),
    _rule(r"dies([ _])over", r"crashes\1while\1handling"),
    _rule(r"die([ _])over", r"crash\1while\1handling"),
    _rule(r"deaths([ _])over", r"crashes\1while\1handling"),
    _rule(r"death([ _])over", r"crash\1while\1handling"),
    _rule(r"(?<![\"'])go([ _])on(?![\"'])", "continue"),
    _rule(r"goes[ _]on", "continues"),
    _rule(r"going[ _]on", "continuing"),
    _rule(r"(?:went|gone)[ _]on", "continued"),
    _rule(r"created([ _])anew", "re-created"),
    _rule(r"encrypted anew", "re-encrypted"),
    _rule(r"anew", "again"),
    _rule(r"one of both", "one of the two"),
    _rule(r"one_of_both", "one_of_the_two"),
    _rule(r"again([ _])and\1again", "repeatedly"),
    _rule(r"characters that can be seen", "printable characters"),
    _rule(r"beside(?= |_|$)", lambda found: "next to"),
    (re.compile(r",? too(?=[.;:)])"), " as well"),
    (re.compile(r", too,"), " as well,"),
]


def _in_words(line: str) -> str:
    parts = re.split(r"((?<!\w)(?!test_)\w*_\w*)", line)  # names of other things than tests stay
    for pattern, new in RULES:
        parts[::2] = [pattern.sub(new, part) for part in parts[::2]]
    line = "".join(parts)
    # A name has no spaces.
    line = re.sub(r"(?<=\w_)next to(?=_\w)", "next_to", line)
    return re.sub(r"(?<=\w_)re-created", "recreated", line)


def _prose(text: str) -> dict[int, str]:
    """Return for each line of a comment of its own or a docstring of several lines its kind."""
    kinds: dict[int, str] = {}
    lines = text.splitlines()
    try:
        for token in tokenize.generate_tokens(StringIO(text).readline):
            first, last = token.start[0], token.end[0]
            if token.type == tokenize.COMMENT and lines[first - 1].lstrip().startswith("#"):
                kinds[first] = "comment"
            elif token.type == tokenize.STRING and last > first and token.line.lstrip()[:3] == '"""':
                kinds |= {line: "docstring" for line in range(first, last)}
    except tokenize.TokenError:
        pass
    return kinds


def _wrapped(lines: list[str], kinds: dict[int, str]) -> Iterator[str]:
    """Yield the lines; the last words of one that is too long begin the next."""
    carried = ""
    indent = ""
    for number, line in enumerate(lines, 1):
        kind = kinds.get(number)
        body = line.strip()
        mark = "# " if kind == "comment" else ""
        if carried:
            text = body.removeprefix("#").strip() if kind else ""
            joins = kind and text and not re.match(r"[-*|:`>]|\d\.|    ", text)
            if joins and line.startswith(indent + mark.strip()):
                line = f"{indent}{mark}{carried} {text}"
            else:
                yield f"{indent}{held}{carried}"
            carried = ""
        if kind and len(line) > WIDTH and "noqa" not in line:
            indent = line[: len(line) - len(line.lstrip())]
            cut = line.rfind(" ", 0, WIDTH + 1)
            if cut > len(indent) + 8:
                line, carried, held = line[:cut], line[cut + 1 :], mark
        yield line
    if carried:
        yield f"{indent}{held}{carried}"


def _changed(path: str, text: str) -> str:
    old = text.splitlines()
    new = []
    kinds = _prose(text) if path.endswith(".py") else {}
    for number, line in enumerate(old, 1):
        better = _in_words(line)
        if path.endswith(".py") and len(better) > max(WIDTH, len(line)) and number not in kinds:
            print(f"too long, skipped: {path}:{number}: {better.strip()}")
            better = line
        new.append(better)
    return "\n".join(_wrapped(new, kinds)) + ("\n" if text.endswith("\n") else "")


def _files() -> Iterator[tuple[str, Path]]:
    for path in sorted(ROOT.rglob("*")):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix in SUFFIXES and not LEFT.search(name) and path.is_file():
            if not path.is_symlink():
                yield name, path


def main() -> None:
    """Apply the tables, then the rules, and print what was skipped."""
    texts = {name: path.read_text("utf-8") for name, path in _files()}
    before = dict(texts)
    for where, old, new in json.loads((HERE / "sentences.json").read_text("utf-8")):
        hits = [n for n, t in texts.items() if old in t and (where == "*" or fnmatch(n, f"*{where}"))]
        for name in hits:
            texts[name] = texts[name].replace(old, new)
        if not hits:
            print(f"no match: {where}: {old!r}")
    names = [tuple(one) for one in json.loads((HERE / "names.json").read_text("utf-8"))]
    for line in (HERE / "long_tests.txt").read_text("utf-8").splitlines():
        old, new = line.split("\t")[:2]
        names.append((old, new, "*"))
    for old, new, where in names:
        pattern = re.compile(rf"(?<!\w){re.escape(old)}(?!\w)")
        taken = re.compile(rf"(?<!\w){re.escape(new)}(?!\w)")
        hits = [n for n, t in texts.items() if fnmatch(n, f"*{where}") and pattern.search(t)]
        clash = [n for n in hits if taken.search(texts[n])]
        if clash or not hits:
            print(f"{'clash' if clash else 'no match'}: {old} -> {new}: {', '.join(clash) or where}")
            continue
        for name in hits:
            texts[name] = pattern.sub(new, texts[name])
    for name, text in texts.items():
        text = _changed(name, text) if name.endswith((".py", ".html")) else text
        if text != before[name]:
            if name.endswith(".py") and "<<" not in text:
                try:
                    compile(text, name, "exec")
                except SyntaxError as error:
                    print(f"left as it was, does not compile: {name}:{error.lineno}: {error.text}")
                    continue
            (ROOT / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
