"""What a node tells the people who run it: the status, its event stream and the dashboard."""
