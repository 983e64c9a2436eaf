"""Contracts: schemas of the events that a service consumes and publishes, and their compatibility.

`schemas` generates the JSON Schema of events, `export` lists them by topic and type, `asyncapi`
describes the service as an AsyncAPI document with `examples`. `check` compares an export with an
earlier one, by `compare`.
"""
