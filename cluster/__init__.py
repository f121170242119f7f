"""Start and stop a cluster, submit to it, fetch base models."""
