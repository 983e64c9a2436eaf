"""The package's own branch of migrations."""
