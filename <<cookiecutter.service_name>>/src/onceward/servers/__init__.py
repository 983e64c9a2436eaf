"""PostgreSQL and Kafka: connections, clients, patches of aiokafka, retries, tasks."""
