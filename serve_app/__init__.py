"""The Serve application: vLLM's own ASGI app in pinned replicas."""
