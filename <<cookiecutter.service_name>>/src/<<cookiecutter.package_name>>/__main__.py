"""`python -m <<cookiecutter.package_name>>` is the command `service`."""

from .main import main

main.run_process()
