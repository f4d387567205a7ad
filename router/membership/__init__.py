"""Ways to learn about nodes: heartbeats, Kubernetes pods, vLLM's pings, health checks, warm-ups."""
