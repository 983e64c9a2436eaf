"""The operations page: a service's standing in a browser, and what a person decides on.

A process of its own beside those that consume and relay, started by `service page`. What it changes
it changes by the engine's operations, as the command line does. `docs/operations-page.md` says how
it is run, and what it is protected by.
"""
