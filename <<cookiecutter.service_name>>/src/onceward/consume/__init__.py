"""The consumer group member: reads assigned partitions from the positions that are stored."""
