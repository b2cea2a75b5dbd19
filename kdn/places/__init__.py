"""Where knowledge lives, under which names: stores and names opened from strings."""
