"""The command `service page`."""

from importlib import import_module

import typer

from onceward import Service
from onceward.cli.terminal import read_settings, run_to_end, serving

from .settings import PageSettings


def group(service: Service, *modules: str) -> typer.Typer:
    """Return the command for a service.

    `modules` are those with pages of optional packages, see `Page`.
    """
    app = typer.Typer(help="Serve the operations page.", invoke_without_command=True)

    @app.callback(epilog="For example: service page")
    def page() -> None:
        """Serve the operations page, until SIGTERM or SIGINT."""
        with serving() as tell:
            settings = read_settings(service, tell, PageSettings)
            # Imported here because no other command needs a web server.
            from .serving import serve

            more = [import_module(one) for one in modules]
            run_to_end(serve(service, settings, PageSettings(), more), tell)

    return app
