"""Ways to learn about nodes: heartbeats, Kubernetes pods, health checks."""
