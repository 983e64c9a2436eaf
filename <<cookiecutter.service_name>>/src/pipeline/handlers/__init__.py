"""What users write against: registry, transaction, aggregates, ordering, policy."""
