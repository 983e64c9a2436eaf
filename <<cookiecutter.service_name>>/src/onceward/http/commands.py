"""The command `service api`."""

from importlib import import_module

import typer

from onceward import Service
from onceward.cli.terminal import read_settings, run_to_end, serving

from .settings import HttpSettings


def group(service: Service, module: str) -> typer.Typer:
    """Return the command for a service; `app` in the module is its application."""
    commands = typer.Typer(help="Serve the HTTP API.", invoke_without_command=True)

    @commands.callback(epilog="For example: service api")
    def api() -> None:
        """Serve the HTTP API, until SIGTERM or SIGINT."""
        with serving() as report:
            settings = read_settings(service, report, HttpSettings)
            # Here, because no other command needs a web server.
            from .serving import serve

            run_to_end(serve(import_module(module).app, service, settings), report)

    return commands
