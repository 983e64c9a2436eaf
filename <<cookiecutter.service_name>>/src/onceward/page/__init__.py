"""The operations page: a service's status in a browser, with redrive, discard and cancel.

`service page` runs it as a process of its own, beside consumers and relays. Changes are made by the
same operations as those of the command line. `docs/operations-page.md` describes how to run it and
how access is controlled.
"""
