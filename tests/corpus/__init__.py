"""Comparisons on public libraries, which take gigabytes and minutes: ``make test-corpus``."""
