"""Debezium in place of the relay: the connector's configuration, and the relay that follows it.

`connector` describes role, publication, replication slot and connector; `following` is the relay
behind `service debezium follow`. See `docs/debezium.md`.
"""
