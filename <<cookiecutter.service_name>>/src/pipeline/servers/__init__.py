"""PostgreSQL and Kafka: connections, clients, leases, errors, tasks."""
