"""Events: models, CloudEvents attributes, payloads and their hashes."""
