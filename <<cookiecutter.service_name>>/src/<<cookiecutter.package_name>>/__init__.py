"""<<cookiecutter.description>>."""
