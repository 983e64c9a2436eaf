"""The interface for a service's code: registry, transaction, aggregates, ordering, policy."""
