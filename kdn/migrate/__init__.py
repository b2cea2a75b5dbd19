"""Settings of other systems, as kdn's: `kdn import`."""
