"""The relay: publishes the outbox to Kafka, shard by shard, under leases."""
