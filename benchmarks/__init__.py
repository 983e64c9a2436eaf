"""The benchmark: this service beside what else one could have written, all in one run."""
