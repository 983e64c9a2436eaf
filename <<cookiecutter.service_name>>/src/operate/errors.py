"""Errors that end a command with one sentence."""


class Refused(Exception):
    """The request can't be carried out; the text says why, and what can be."""


class Unavailable(Exception):
    """A server can't be used; the text names it, and the variable that says where it is."""


NOT_LET_IN = ("28", "3D", "42501")
"""How PostgreSQL's error codes begin for a wrong user, password or database, and for a privilege
that the user lacks."""
