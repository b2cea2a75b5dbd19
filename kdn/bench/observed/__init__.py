"""What it costs to be watched: metrics, the request log and traces."""
