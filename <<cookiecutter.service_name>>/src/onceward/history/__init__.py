"""What happened to a key: its messages, events, dead letters and releases, in the order of time."""
