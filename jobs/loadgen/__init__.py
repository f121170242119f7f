"""The load generator: arrivals, prompts, one HTTP client, the runner and its arithmetic."""
