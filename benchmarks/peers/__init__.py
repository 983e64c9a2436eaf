"""Other packages for inbox and outbox, each in a program as its documentation advises.

They run in an environment of their own: see `benchmarks/measures/peers.py`.
"""
