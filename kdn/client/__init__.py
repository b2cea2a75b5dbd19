"""The front door: learn, load, ask, publish, forget, wherever knowledge lives."""
