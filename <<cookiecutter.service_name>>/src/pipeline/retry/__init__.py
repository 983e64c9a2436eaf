"""The workers of the backlog: they take what is due, in the order of each key."""
