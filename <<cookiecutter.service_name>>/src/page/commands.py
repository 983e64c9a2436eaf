"""The command `service page`."""

import typer

from operate.terminal import read_settings, run_to_end, serving
from pipeline import Service

from .settings import PageSettings


def group(service: Service) -> typer.Typer:
    """Return the command for a service."""
    app = typer.Typer(help="Serve the operations page.", invoke_without_command=True)

    @app.callback(epilog="For example: service page")
    def page() -> None:
        """Serve the operations page, until SIGTERM or SIGINT."""
        with serving() as tell:
            settings = read_settings(service, tell, PageSettings)
            # Imported here because no other command needs a web server.
            from .serving import serve

            run_to_end(serve(service, settings, PageSettings()), tell)

    return app
