"""Getting a context's cache in time: what to fetch, what to recompute, and carrying it out."""
