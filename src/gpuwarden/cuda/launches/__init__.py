"""A workload's launch profile, learned from a known-good run, and how live launches fit it."""
