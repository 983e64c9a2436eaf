"""The HTTP server of the API and of the operations page."""
