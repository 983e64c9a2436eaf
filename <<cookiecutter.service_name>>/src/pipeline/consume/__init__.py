"""Members of the consumer group: what they read from Kafka, and where they begin."""
