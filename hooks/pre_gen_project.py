"""Before the first file: the answers once more, now those that are replayed from a file as well.

Cookiecutter renders this file before it runs it, and `checked` stops it there if an answer cannot
be used: no hostile answer ever gets into a line of Python. See `local_extensions.py`.
"""

CHECKED = "<<cookiecutter | checked>>"
