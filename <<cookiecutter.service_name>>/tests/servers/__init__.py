"""Real servers and real processes, for all tests."""
