"""What sections of a stream hold: the numbers of `docs/format.md`, where codec.py explains them."""

KIND_ENTERING, KIND_TOKENS, KIND_SINKS, KIND_CORRECTION, KIND_DIGITS, KIND_MEANS = range(6)
