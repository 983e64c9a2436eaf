"""The backlog's workers: they handle due rows, in the order of each key."""
