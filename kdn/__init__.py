"""A knowledge delivery network: encode, store and deliver what language models have read."""
