"""The command `service page`."""

import typer
from pydantic import ValidationError

from pipeline import Service
from pipeline.terminal import read_settings, run_to_end

from .settings import PageSettings


def group(service: Service) -> typer.Typer:
    """Return the command for a service."""
    app = typer.Typer(help="Serve the operations page.", invoke_without_command=True)

    @app.callback()
    def page() -> None:
        """Serve the operations page, until SIGTERM or SIGINT."""
        settings, chosen = read_settings(), _read_page_settings()
        # Here, because no other command needs a web server.
        from .serving import serve

        run_to_end(serve(service, settings, chosen))

    return app


def _read_page_settings() -> PageSettings:
    try:
        return PageSettings()
    except ValidationError as error:
        typer.echo("The settings of the page are wrong:", err=True)
        for mistake in error.errors(include_url=False, include_input=False):
            name = "_".join(str(part) for part in mistake["loc"]).upper()
            text = mistake["msg"].removeprefix("Value error, ")
            typer.echo(f"  {f'PIPELINE_PAGE_{name}: ' if name else ''}{text}", err=True)
        raise typer.Exit(2) from None
