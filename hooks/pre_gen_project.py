"""Before the first file: check the answers, including those that are replayed from a file.

Cookiecutter renders this file before it runs it, and `checked` raises an error during rendering if
an answer is invalid: so no answer is ever executed as Python. See `local_extensions.py`.
"""

CHECKED = "<<cookiecutter | checked>>"
