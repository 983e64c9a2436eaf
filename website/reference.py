"""The pages that are generated from the code of a service, which can be imported.

It is one with every optional part, so that nothing is missing.
"""

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import typer
import yaml
from opentelemetry import metrics
from pydantic_settings import BaseSettings
from typer.cli import get_docs_for_click
from typer.main import get_command

from . import samples
from .instruments import Recorder, table
from .navigation import RAW, ROOT

T = TypeVar("T")

MAIN = "parcel_tracker.main"
EXCEPTIONS = {
    "Exceptions that a handler raises": ("onceward.Retry", "onceward.Park", "onceward.Reject"),
    "Exceptions that your code meets": (
        "onceward.OncewardError",
        "onceward.Conflict",
        "onceward.Unpublishable",
        "onceward.Undecodable",
        "onceward.HandlerFault",
        "onceward.StoreUnavailable",
        "onceward.Misconfigured",
        "onceward.WrongDatabase",
        "onceward.NotAdopted",
        "onceward.testing.HarnessMisused",
    ),
}
"""Described on a page of their own."""

API: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "service": (
        "Service, handlers, transaction",
        {"onceward": ("Service", "Handlers", "Transaction", "EventBatch", "Policy")},
    ),
    "rows": (
        "Rows",
        {"onceward": ("Aggregate", "Loads", "Sequenced", "Gaps", "Timed", "Versioned")},
    ),
    "events": (
        "Events, messages, codecs",
        {
            "onceward": (
                *("Event", "Tombstone", "Message", "Codec", "CloudEvents", "Applied"),
                *("AppliedEvent", "Record", "Outgoing", "Encoded", "Reason", "payload_hash"),
            ),
            "onceward.plain": (),
        },
    ),
    "writer": ("Writers", {"onceward": ("Writer", "Writing")}),
    "testing": ("The test kit", {"onceward.testing": ()}),
    "optional": (
        "Optional packages",
        {
            "onceward.effects": (),
            "onceward.schema_registry": (),
            "onceward.archive": (),
            "onceward.claims": (),
        },
    ),
}
"""Title of each page and the names on it, by package; without names: all that it exports."""

MEMBERS = {
    "onceward.Handlers": "on, on_batch, correct, topic",
    "onceward.Service": "resources, writer",
    "onceward.effects.Effects": "on",
}
"""What users call, of classes that the engine calls as well; of others: all."""

SHAPES = {"onceward.Outgoing", "onceward.Record"}
"""Classes whose members have no docstrings: their names and types say it."""

INTERNAL = "end, placed, model_config, model_post_init"
FOREIGN = "ABC, BaseModel, BaseSettings, Protocol, str, tuple"
"""Classes whose members are described elsewhere."""


def write(folder: Path) -> None:
    """Write the pages into a folder that has those with a file.

    Raises `LookupError` for a name that the engine exports and no page describes.
    """
    recorder = Recorder()
    metrics.set_meter_provider(recorder)  # before a module of the service gets it
    import_module(MAIN)
    import_module("onceward.runtime")
    (folder / "metrics.md").write_text(_metrics(recorder), "utf-8")
    (folder / "commands.md").write_text(_commands(), "utf-8")
    with (folder / "settings.md").open("a", encoding="utf-8") as page:
        page.writelines(_optional_settings())
    (folder / "api").mkdir(exist_ok=True)
    for name, (title, packages) in API.items():
        (folder / "api" / f"{name}.md").write_text(_objects(title, packages), "utf-8")
    (folder / "api" / "errors.md").write_text(_errors(), "utf-8")
    if missing := _unlisted():
        raise LookupError(f"website/reference.py describes no {', '.join(missing)}")


def _metrics(recorder: Recorder) -> str:
    head = (
        "# Metrics\n\nFirst the name at `/metrics`, then the one of OpenTelemetry, for export by"
        " `PIPELINE_OTLP_ENDPOINT`. [Monitoring](monitoring.md#metrics) explains some.\n\n"
    )
    return head + table(recorder, _alerts())


def _alerts() -> dict[str, str]:
    """Return the expression of each alert."""
    text = (ROOT / RAW / "deploy" / "prometheus" / "alerts.yaml").read_text("utf-8")
    groups = yaml.safe_load(text)["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def _commands() -> str:
    """Return what Typer's own tool says of the commands, without what repeats."""
    group = get_command(import_module(MAIN).main)
    context = typer.Context(group, info_name="service")
    text = get_docs_for_click(obj=group, ctx=context, name="service", title="Commands")
    text = text.replace("&#x27;", "'").replace("&quot;", '"')
    text = re.sub(r"\* `--help`: .*\n", "", text)
    text = re.sub(r"\*\*Commands\*\*:\n\n(\* .*\n)+\n", "", text)
    text = re.sub(r"\*\*Options\*\*:\n\n(?!\*)", "", text)
    text = re.sub(r"\*\*Usage\*\*:\n\n```console\n\$ (.*)\n```", r"```text\n\1\n```", text)
    text = re.sub(r"^For example: (.*)$", r"```sh\n\1\n```", text, flags=re.MULTILINE)
    text = samples.added(text, samples.read())
    return text.replace("The service parcel-tracker.", "Of a service with every optional part.")


def _optional_settings() -> Iterator[str]:
    """Yield the settings of each optional package, as `dev/settings_guide.py` prints them."""
    guide = _guide()
    found = {one.model_config.get("env_prefix", ""): one for one in _derived(BaseSettings)}
    for prefix, one in sorted(found.items()):
        if prefix.startswith("PIPELINE_") and prefix != "PIPELINE_":
            package = one.__module__.rpartition(".")[0]
            yield f"\n## Of the optional package `{package}`\n\n{guide.table(one)}"


def _derived(base: type[T]) -> Iterator[type[T]]:
    for one in base.__subclasses__():
        yield one
        yield from _derived(one)


def _guide() -> ModuleType:
    sys.path.append(str(ROOT / RAW / "dev"))
    return import_module("settings_guide")


def _objects(title: str, packages: dict[str, tuple[str, ...]]) -> str:
    elsewhere = {name for names in EXCEPTIONS.values() for name in names}
    page = [f"# {title}\n"]
    for package, names in packages.items():
        if len(packages) > 1:
            page.append(f"## `{package}`\n")
        exported = import_module(package)
        page += [
            _object(package, name, getattr(exported, name))
            for name in names or exported.__all__
            if f"{package}.{name}" not in elsewhere
        ]
    return "\n".join(page)


def _errors() -> str:
    page = ["# Exceptions\n"]
    for title, names in EXCEPTIONS.items():
        page.append(f"## {title}\n")
        for path in names:
            package, _, name = path.rpartition(".")
            page.append(_object(package, name, getattr(import_module(package), name)))
    return "\n".join([*page, "".join(_all_errors())])


def _all_errors() -> Iterator[str]:
    """Yield a table of the errors with the common base, which says where each is and what it means.

    Modules that nothing has imported yet have errors, too.
    """
    source = Path(str(import_module("onceward").__file__)).parents[1]
    for path in source.rglob("*.py"):
        if path.name != "__init__.py" and "OncewardError" in path.read_text("utf-8"):
            import_module(".".join(path.relative_to(source).with_suffix("").parts))
    base: type[Exception] = import_module("onceward").OncewardError
    yield f"## All errors\n\nAll derive from `{base.__name__}`.\n\n"
    yield "| error | module | meaning |\n| --- | --- | --- |\n"
    for one in sorted(_derived(base), key=lambda one: (one.__module__, one.__name__)):
        if not one.__name__.startswith("_"):
            text = (getdoc(one) or "").partition("\n\n")[0]
            meaning = text.replace("\n", " ").replace("|", "\\|")
            yield f"| `{one.__name__}` | `{one.__module__}` | {meaning} |\n"


def _object(package: str, name: str, what: object) -> str:
    path = f"{package}.{name}"
    lines = [f".. autofunction:: {path}"]
    if isinstance(what, type) and issubclass(what, Exception):
        lines = [f".. autoexception:: {path}"]
    elif path in MEMBERS:
        lines = [f".. autoclass:: {path}", f"   :members: {MEMBERS[path]}"]
    elif isinstance(what, type):
        lines = [
            f".. autoclass:: {path}",
            "   :members:",
            f"   :inherited-members: {FOREIGN}",
            f"   :exclude-members: {INTERNAL}",
            *(["   :undoc-members:"] if path in SHAPES else []),
        ]
    body = "\n".join(lines)
    return f"```{{eval-rst}}\n{body}\n```\n"


def _unlisted() -> list[str]:
    """Return names that the engine exports and no page describes."""
    package = import_module("onceward")
    listed = {name for _, packages in API.values() for name in packages.get("onceward", ())}
    listed |= {path.rpartition(".")[2] for names in EXCEPTIONS.values() for path in names}
    return sorted(set(package.__all__) - listed)
