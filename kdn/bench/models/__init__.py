"""Small models of other shapes than SmolLM2's: trained here, calibrated, and judged."""
