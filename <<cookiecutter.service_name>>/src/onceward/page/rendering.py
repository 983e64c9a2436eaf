"""Rendering of templates, which escape every value."""

from collections.abc import Sequence
from functools import partial
from types import ModuleType

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from starlette.responses import HTMLResponse, Response

from onceward.cli.output import format_span
from onceward.cli.status import format_count
from onceward.cli.words import WORDS
from onceward.observe.traces import trace_id

from . import formatting, overview
from .sessions import Operator
from .settings import PageSettings


class Templates:
    """The templates of a service's operations page, and of modules that add pages."""

    def __init__(
        self, service: str, settings: PageSettings, modules: Sequence[ModuleType] = ()
    ) -> None:
        packages = ["onceward.page", *(one.__package__ or "" for one in modules)]
        self._environment = Environment(
            loader=ChoiceLoader([PackageLoader(one) for one in packages]),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.globals.update(
            visible=formatting.visible,
            content=formatting.content,
            plain=formatting.plain,
            editable=formatting.editable,
            moment=formatting.moment,
            ago=format_span,
            ranges=formatting.ranges,
            trace_id=trace_id,
            trace_url=partial(formatting.trace_url, settings.trace_url),
            lines=overview.lines,
            number=format_count,
            width=overview.WIDTH,
            height=overview.HEIGHT,
            words=WORDS,
            more=tuple(pair for one in modules for pair in one.NAMES.items()),
            service=service,
            has_login=settings.token is not None,
        )

    def text(self, template: str, **values: object) -> str:
        """Return a rendered template."""
        return self._environment.get_template(template).render(**values)

    def page(
        self, template: str, operator: Operator | None, status: int = 200, **values: object
    ) -> Response:
        """Return a page as a response."""
        text = self.text(template, operator=operator, **values)
        # JSON may contain lone surrogates, which UTF-8 can't encode.
        return HTMLResponse(text.encode("utf-8", "replace"), status)

    def note(self, operator: Operator | None, text: str, status: int = 200) -> Response:
        """Return a page that consists of one message."""
        return self.page("note.html", operator, status, text=text)
