"""`kdn bench tasks`: what codecs do to a model's answers, as papers on KV caches measure it."""
