"""Joining pieces that were learned apart: where each comes to stand, and what repairs it there."""
